"""Batches and losses."""

from .guard import Guard

CUT_BATCHES = Guard(
    "how a batch is cut",
    "tensors that would go whole to every microbatch, or be cut along the wrong dimension",
    "in every step",
    "comparing the sizes of the tensors of a batch",
    "specify with batch_dims= which tensors to cut, such as {'x': 0} or (0, None)",
    "a tensor that only happens to have the batch size",
)
LOSS_COUNTS = Guard(
    "what a loss averages over",
    "microbatches weighted by their samples, although the loss ignores some of their targets",
    "in every step",
    "counting the targets of -100, unless the loss is torch's",
    "pass loss_weight=, a function of a microbatch's target that counts what the mean is over",
    "weighted means that you write yourself; a loss that compares samples with each other",
)
LOSS_DIVISORS = Guard(
    "what a cross entropy divides by",
    "a cross entropy inside your own loss that divides by something other than the weight of its microbatch",
    "in every step",
    "a walk over the graph of the loss; on a GPU one small copy, which is read a step later",
    "pass loss_weight=, a function of a microbatch's target that counts what the loss divides by",
    "other replicas; `evaluate`; a loss that runs as a CUDA graph",
)
FETCHED_BATCHES = Guard(
    "batches of Hugging Face's Trainer",
    "a batch passed to `training_step` that is not the one the pipeline has trained on, or was changed there; a "
    "`compute_loss` of your own that calls the model with other values when it runs a second time",
    "in every step",
    "comparing references and version counters; comparing the values of calls, on GPUs in the first step only",
    "change batches in the data collator, or override get_batch_samples",
    "what `compute_loss` draws or counts for the loss alone",
)
RESUMED_DATA = Guard(
    "data of a resumed run",
    "data or seeds that differ from those with which a run was saved",
    "before the first step",
    "comparing a few numbers",
    "continue with the data that the run began with",
)
