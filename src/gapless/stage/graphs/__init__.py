"""Actions as CUDA graphs.

graphed            a stage whose actions are graphs; `replay`: one of them
graph_memory       what graphs read and write
cast_places        casts of weights, once per step
low_grads          and their gradients, before they are cast back
graph_sharing      microbatches that share graphs, and the warning where a stage gives graphs up
graph_assumptions  what graphs take for granted, and so the reasons to refuse one
code_run           the Python code that a graph stands for
graph_trial        whether they are worth it
"""
