"""What layers hold."""

from .guard import Guard

STORED_TENSORS = Guard(
    "stored tensors",
    "a value that a layer stores in an attribute and that the loss, another stage or a backward reads: it may belong "
    "to another microbatch",
    "in every step",
    "comparing references to the attributes of modules other than torch's, after each forward",
    "return it from the layer with its output, or let the layer add it to the loss of its microbatch with "
    "gapless.aux_loss",
    "global variables; attributes of compiled layers",
)
SHARED_STATE = Guard(
    "shared Python state",
    "attributes, lists, dicts, objects and closures that layers of two stages hold and a forward changes",
    "in every step",
    "a walk over the state of the layers at the start of a step; comparing shared state after each forward",
    "pass the value with the activations, or give each layer its own",
    "global variables, class attributes and state that forward hooks reach, unless remat runs the layer again; queues, "
    "generators, random numbers, objects with a lock, more than 65,536 objects, entries replaced in a list of more "
    "than 4096; changes by backward hooks",
)
RESTARTED_FORWARDS = Guard(
    "forwards that start again",
    "a change that a forward makes for the first time in a run that is repeated: it would be made twice",
    "in every step",
    "a copy of the state that changes, before each forward; a copy of all state in the first step and now and then",
    "let the layer do so from the first step on",
    "objects with a lock, C objects of other libraries, written files; globals and class attributes of installed "
    "packages",
)
RECOMPUTED_STATE = Guard(
    "state in recomputes",
    "buffers, attributes and objects that a recompute in a backward uses after later microbatches have changed them",
    "in every step",
    "a copy of the state that changes, for each microbatch",
    "take what changes it out of the checkpoint, pass its value to the checkpoint as an argument, or use remat= in "
    "place of the checkpoint",
    "objects with a lock, C objects of other libraries, written files; globals and class attributes of installed "
    "packages; entries that recomputes add to a global list which layers of two stages extend",
)
SHARED_BUFFERS = Guard(
    "buffers of two stages",
    "a buffer that several stages change, in another order than plain training",
    "in every step",
    "comparing version counters of buffers that stages share",
    "choose a partition that keeps its layers in one stage, or give each layer its own buffer",
)
FORWARD_ORDER = Guard(
    "the order of forwards",
    "buffers that depend on the order of microbatches, with a schedule whose forwards are out of order",
    "in every step",
    "comparing microbatch numbers",
    "choose a schedule with forwards in order",
)
CHECKPOINTED_NORMS = Guard(
    "batch norms in checkpoints",
    "running statistics that a recompute of torch.utils.checkpoint updates more or less often than in plain training",
    "in every step",
    "counting calls of batch norms inside checkpoints",
    "take it out of the checkpoint, or use remat= in place of the checkpoint",
)
