"""How the calls of layers are seen, and how their weight gradients wait.

interception          inside the mode, outside of it, or neither
call_mode             the one function mode; `call_table`: what it answers; `call_signature`: the arguments of a call;
                      `kept_casts`: those of weights that autocast would keep
linear                handlers that let weight gradients wait (a new one: see `call_table`); `convolution`: more of them
compiled_backward     the backward of a compiled region, in two parts
deferred              the gradients that wait; `graph_task`: for whom a backward runs
ordered_accumulation  gradients that wait for their microbatch's turn
reached_parameters    which parameters a graph reaches
"""
