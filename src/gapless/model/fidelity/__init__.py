"""What makes a trace do what the model does.

in_place_changes    what a graph changes in place, and where it therefore must not be cut
batch_questions     what a model asks of its batch: `if mask.all()`
plain_choices       a trace makes the choices of a plain call
untraceable         what a trace would lose without a word is refused
forward_state       what a forward changes in Python, which a trace does not
second_run          whether the next run of a forward does what the first has done
checkpointed_norms  batch norms that a plain loop runs again in its backward
own_backward        functions with a backward of their own, which a trace keeps as the calls they are
thread_patches      what the thread that traces calls in place of torch's own functions
traced_forward      what holds in the forward of a traced model only
"""
