"""Seeds and draws: every layer draws what it draws in the plain loop.

seeds            the seed of each (step, microbatch, layer)
draws            private generators; `exclusive`: one thread at a time
random_calls     torch's random functions
hidden_draws     draws that the mode can't see
drawless_layers  layers that draw nothing, which the mode need not see
backward_draws   draws in a backward, which can't be those of plain training
"""
