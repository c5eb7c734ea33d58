"""Weights and gradients."""

from .guard import Guard

FORWARD_WEIGHTS = Guard(
    "weights that a forward changes",
    "a weight that changes in a forward, as with nn.Embedding(max_norm=), and that a recompute, another stage or "
    "another version reads",
    "in every step",
    "comparing version counters of the weights that are read again; layers that ask for `.data` get `.detach()`",
    "use remat='none', and a weight that no other stage shares",
    "an alias from before the step; compiled layers",
)
SAVED_TENSORS = Guard(
    "tensors that a backward needs",
    "a weight or a buffer that a later forward changes before the backward of this microbatch computes with it",
    "in every step",
    "nothing: autograd checks it anyway",
    "let the layer compute with a clone() of it, as in F.linear(x, weight.clone())",
    "an alias from before the step; compiled layers",
)
NOTHING_TO_TRAIN = Guard(
    "a loss without gradients",
    "a model that is completely frozen, so that a step would train nothing",
    "in every step",
    "reading requires_grad of the loss",
    "unfreeze a layer, or use pipe.evaluate",
)
BACKWARD_WEIGHTS = Guard(
    "weights that a backward changes",
    "a weight that an optimizer in a hook changes while other microbatches or replicas compute with it",
    "in every step",
    "comparing version counters after each backward, where weights have hooks",
    "step the optimizer after pipe.step",
    "a hook that changes weights of another stage; hooks of autograd's own nodes",
)
FORWARD_GRADS = Guard(
    "gradients in a forward",
    "`.grad` of a weight that a forward reads or sets: it lacks the gradients of microbatches in flight",
    "in every step",
    "an entry in the table of intercepted calls",
    "do so after pipe.step, or in a hook of the weight, or use microbatches=1",
    "layers that run without interception and start later",
)
FROZEN_WEIGHTS = Guard(
    "weights that a forward freezes",
    "`requires_grad_` in a forward, which would affect the backwards of other microbatches",
    "in every step",
    "an entry in the table of intercepted calls",
    "let the layer use weight.detach() where the weight should not be trained, or use microbatches=1",
    "layers that run without interception and start later",
)
FORWARD_BACKWARDS = Guard(
    "backward in a forward",
    "`backward()` in a forward that adds to gradients of the stage, in another order, and twice with remat",
    "in every step",
    "an entry in the table of intercepted calls; a walk over the graph of that backward",
    "pass that loss to gapless.aux_loss instead, or, for gradients that the forward itself needs, call "
    "torch.autograd.grad",
    "compiled layers; layers that run without interception and start later",
)
LOOSE_TENSORS = Guard(
    "trainable tensors that are not parameters",
    "an unregistered tensor with requires_grad that two stages use: its gradients have no order, and a stream has no "
    "versions of it",
    "in every step",
    "a walk over the graph of a stage, when its size changes",
    "make it an nn.Parameter of a module",
    "stages in different processes",
)
WEIGHTS_ELSEWHERE = Guard(
    "weights of another stage",
    "a layer or a loss that uses weights whose values are in another process, or at another minibatch",
    "in every step",
    "a walk over the graph of a stage, when its size changes",
    "use them in a layer of that stage, or, for a penalty on weights, give the optimizer weight_decay",
)
SECOND_USES = Guard(
    "second uses of a weight",
    "a weight that only some microbatches use in a second way, with a split backward and autocast or a hook, or unseen "
    "by torch's functions: its gradients would be added in another order",
    "in every step",
    "a walk over the graph of a stage, when its size changes",
    "choose a schedule whose backward is not split, such as 1f1b, or use it so in every microbatch",
)
GRADIENT_HOOKS = Guard(
    "hooks on gradients",
    "a hook on a parameter whose gradient arrives in parts, late, or for another version",
    "in every step",
    "reading the hooks of parameters",
    "remove the hook",
)
TIED_GRADIENTS = Guard(
    "gradients of shared parameters",
    "a shared parameter that gets two gradients in one backward, of which only one would count",
    "in every step",
    "counting gradients of shared parameters",
    "pass use_reentrant=False",
)
NOT_FINITE = Guard(
    "gradients that are not finite",
    "an update with NaN or infinite gradients, in streams, replicas and `gapless train`",
    "in every step",
    "one sum over the gradients of an update, or the loss",
    "a smaller learning rate or clip=1.0 may help",
    "`pipe.step`, since you call the optimizer",
)
