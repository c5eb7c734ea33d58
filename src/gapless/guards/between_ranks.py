"""Ranks and streams."""

from .guard import Guard

SAME_CALLS = Guard(
    "calls of all ranks",
    "ranks that make different calls, or the same calls with different arguments or modes, and would mix up messages; "
    "ranks with other modules, settings of torch's modules or forwards",
    "in every step",
    "25 bytes in each message",
    "all ranks make the same calls, with the same arguments: also save, load, state_dict and evaluate, so call none of "
    "them in an `if rank == 0:`",
    "other code in functions that a forward calls, and in a loss; other numbers in attributes of your own modules",
)
SAME_WEIGHTS = Guard(
    "weights of all ranks",
    "ranks that start with different weights, for example from different seeds",
    "before the first step",
    "a fingerprint of each tensor, once",
    "call torch.manual_seed with the same number on every rank before the model is made, load the same file on every "
    "rank, or load it with load_state_dict of the pipeline",
    "elements that the fingerprint of a large tensor leaves out; sparse and quantized tensors",
)
SAME_BATCHES = Guard(
    "batches of all ranks",
    "ranks whose loaders shuffle differently, so that inputs of one sample meet targets of another",
    "now and then",
    "a fingerprint of the batch in the first steps, then less and less often",
    "give all ranks of a pipeline the same batch, from a loader that is shuffled alike on every rank "
    "(generator=torch.Generator().manual_seed(0)), and other batches only to other replicas (dp)",
    "batches that start to differ later, until the next check",
)
UNEXCHANGED_GRADIENTS = Guard(
    "gradients that were not exchanged",
    "an optimizer step or a clip before replicas have exchanged the gradients of steps with sync=False",
    "in every step",
    "comparing version counters of parameters, with sync=False",
    "make the last step before it one with sync=True, or drop them with the pipeline's zero_grad()",
)
STATIC_SHAPES = Guard(
    "static shapes",
    "a step whose shapes differ from those of the first one, with static_shapes=True; a stage whose output shape "
    "varies for batches of one shape, without asking its GPU for a number",
    "in every step",
    "comparing the shapes of batches and of outputs of stages",
    "give all steps batches of one shape (a DataLoader with drop_last=True does), or leave out static_shapes",
)
TENSORS_ELSEWHERE = Guard(
    "weights and buffers of another rank",
    "a function in `layers=`, or a loss, that changes a weight or a buffer that no layer of its stage has: other "
    "ranks and checkpoints would keep its old value",
    "in every step",
    "comparing version counters of these tensors",
    "make the function a module in `layers=` that owns it",
    "changes through .data",
)
PARTIAL_STATE = Guard(
    "state of one rank",
    "model.state_dict() or model.save_pretrained() on a rank, with initial values for what other ranks train",
    "now and then",
    "comparing version counters of parameters",
    "use pipe.state_dict(), or pipe.save_pretrained() for a Hugging Face model, on all ranks",
    "parameters that are read one by one; a call of the model itself, in place of `pipe.evaluate`",
)
NORM_OF_A_PART = Guard(
    "norm of one rank",
    "torch.nn.utils.clip_grad_norm_ on a rank, which would clip the gradients of its stages by their own norm",
    "now and then",
    "comparing the identities of gradients",
    "use pipe.clip_grad_norm_",
    "norms that are computed in another way",
)
OPTIMIZER_OF_A_PART = Guard(
    "optimizer of one rank",
    "torch.optim.LBFGS on a rank, which would find a direction for the parameters of its stages alone",
    "in every step",
    "a look at the class of each optimizer that steps",
    "use an optimizer that steps each parameter by itself, such as AdamW, or one process",
    "optimizers of other libraries that compute something from all parameters together",
)
STREAM_WEIGHTS = Guard(
    "weights of a stream",
    "weights that are changed, loaded or used from outside while a stream keeps older versions of them",
    "in every step",
    "a sum over the bytes of each parameter when a stream continues; comparing references in every update",
    "make a new stream, which begins with the weights as they are",
)
STREAM_CASTS = Guard(
    "casts in a stream",
    "weights that autocast has cast and cached while a stream updates them",
    "in every step",
    "reading torch's setting",
    "use torch.autocast(..., cache_enabled=False)",
)
STREAM_ENDS = Guard(
    "minibatches of a stream",
    "ranks that end a stream after different numbers of minibatches",
    "in every step",
    "comparing the numbers when a stream ends",
    "give all ranks the same number, and drain after the same one on all",
)
