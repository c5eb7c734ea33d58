"""The model."""

from .guard import Guard

LOST_IN_TRACE = Guard(
    "what a trace would lose",
    "hooks, custom backwards, gradients inside a forward, settings, and random numbers of Python and NumPy",
    "when the model is traced",
    "a mode around the trace",
    "cut the model by hand: Pipeline(model, layers=[...]) with callables that together are the model",
)
TRACED_STATE = Guard(
    "Python state in a traced model",
    "attributes, lists and objects that the forward changes, tensors that it stores and reads the next time, and "
    "anything it does only once, such as setting a scale from the first batch: a trace does the same for all batches",
    "when the model is traced",
    "comparing the state of the model before and after the trace; a second trace if something was set",
    "make it a buffer that the forward changes in place, or pass a list of layers",
)
MODEL_EDITS = Guard(
    "edits of the model",
    "layers, parameters or a new forward that a model gets after its pipeline was made, and that would not run",
    "in every step",
    "about 0.5 us per parameter",
    "edit the model before you make the pipeline",
)
IGNORED_HOOKS = Guard(
    "hooks for all modules",
    "hooks for all modules on a model that a pipeline never calls as a whole",
    "in every step",
    "one look-up in torch's table of such hooks",
    "register them on the modules they are for, or remove them during the step",
)
LEFT_OUT_PARAMETERS = Guard(
    "parameters that nobody trains",
    "parameters that the optimizer does not have, or that it has from elsewhere",
    "before the first step",
    "comparing the parameters of model, stages and optimizers",
    "make it from the parameters that it is given, and from all of them",
)
EMPTY_WEIGHTS = Guard(
    "weights without values",
    "parameters and buffers of a model on the meta device that `init=` has not filled",
    "before the first step",
    "filling them with NaN before `init=` runs",
    "give init= a function of a module and its name that fills every parameter and buffer, also those that no "
    "checkpoint has",
)
