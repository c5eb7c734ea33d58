"""The tables of a config. Each is a dataclass, and each key a field of it, and a line of its docstring: `keys` says how
both are read, and the manual is made of them.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import torch

from gapless.pipeline.schedules import Offload
from gapless.stage.stage import Remat
from gapless.train.config import keys

MODELS = {
    "gpt": "gapless.zoo.gpt:gpt",
    "resnet": "gapless.zoo.resnet:resnet",
    "transformer": "gapless.zoo.transformer:transformer",
    "unet": "gapless.zoo.unet:unet",
    "huggingface": "gapless.train.data.pretrained:causal_language_model",
}
DATA = {
    "python-source": "gapless.train.data.sources:python_source",
    "text": "gapless.train.data.sources:text",
    "records": "gapless.train.data.sources:records",
    "tokens": "gapless.train.data.sources:tokens",
}
LOSSES = {
    "next_token": "gapless.zoo.gpt:next_token_loss",
    "translation": "gapless.zoo.transformer:translation_loss",
    **{
        name: f"torch.nn.functional:{name}"
        for name, value in vars(torch.nn.functional).items()
        if inspect.isfunction(value) and tuple(inspect.signature(value).parameters)[:2] == ("input", "target")
    },
}
_NO_CHOICE = ("Optimizer", "LBFGS", "SparseAdam")  # a base, one that needs a closure, one for sparse gradients alone
OPTIMIZERS = {
    name: f"torch.optim:{name}"
    for name, value in sorted(vars(torch.optim).items())
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and name not in _NO_CHOICE
}
_NO_RATES = ("LRScheduler", "ReduceLROnPlateau", "SequentialLR", "ChainedScheduler", "LambdaLR", "MultiplicativeLR")
OUR_RATES = ("constant", "linear", "cosine")
SCHEDULERS = {
    **{name: f"gapless.train.learning_rate:{name}" for name in OUR_RATES},
    **{
        name: f"torch.optim.lr_scheduler:{name}"
        for name, value in sorted(vars(torch.optim.lr_scheduler).items())
        if isinstance(value, type)
        and issubclass(value, torch.optim.lr_scheduler.LRScheduler)
        and name not in _NO_RATES  # a base, one that needs a measure, and those made of functions or of others
        and not name.startswith("_")
    },
}


# -- the tables -------------------------------------------------------------------------------------------------------

Whole = Annotated[int, keys.whole()]
Count = Annotated[int, keys.whole(0)]
Positive = Annotated[float, keys.positive]
Text = Annotated[str, keys.text]
Truth = Annotated[bool, keys.truth]
Arguments = Annotated[Mapping[str, Any], keys.arguments]
Counts = Annotated[tuple[int, ...], keys.listed(keys.whole(), "a list of whole numbers such as [3, 3, 2]")]
DataName = Annotated[str, keys.named(DATA)]


@dataclass(frozen=True)
class ModelKeys(keys.Part):
    """What is trained.

    name = "gpt"  `gpt`, `resnet`, `transformer` or `unet`; `huggingface`, a config or folder of `transformers`; or your
        own, as `"file.py:function"` or `"package.module:function"`: it returns a module or a list of layers
        | needed: gpt or resnet or transformer or unet, or 'file.py:function'
    arguments = { width = 64, depth = 8, heads = 4 }  a table that is passed to it by name
    """

    key, known = "model", MODELS
    name: Annotated[str, keys.named(MODELS)]
    arguments: Arguments = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DataKeys(keys.Part):
    """What it is trained on.

    name = "python-source"  `python-source`, `text`, `records` or `tokens`, or your own, as `"file.py:function"` or
        `"package.module:function"`: it returns batches
        | needed: python-source or text or records or tokens, or 'file.py:function'
    arguments = { context = 64 }  a table that is passed to it by name
    minibatch = 16  samples in a step, of all replicas together | needed: samples in a step, as 16
    tokenizer = "bytes"  `"bytes"`, or a `tokenizer.json` (needs the package `tokenizers`)
    passes = 1  the number of epochs, if training does not reach `train.steps` before | no limit
    """

    key, known = "data", DATA
    name: DataName
    arguments: Arguments = field(default_factory=dict)
    minibatch: Whole
    tokenizer: Text = "bytes"
    passes: Whole | None = None


@dataclass(frozen=True)
class LossKeys(keys.Part):
    """The training objective.

    name = "next_token"  `next_token`, `translation`, a loss of `torch.nn.functional` such as `cross_entropy`, or your
        own function of outputs and target
        | for `gpt` `next_token`, for `transformer` `translation`, for `resnet` and `unet` `cross_entropy`; for any
        other model the loss it returns
    arguments = {}  a table that is passed to it by name
    """

    key, known = "loss", LOSSES
    name: Annotated[str, keys.named(LOSSES)] | None = None
    arguments: Arguments = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerKeys(keys.Part):
    """The optimizer.

    name = "AdamW"  a class of `torch.optim` (except `LBFGS` and `SparseAdam`), or your own function of the parameters
    arguments = { lr = 3e-3 }  a table that is passed to it by name
    """

    key, known = "optimizer", OPTIMIZERS
    name: Annotated[str, keys.named(OPTIMIZERS)] = "AdamW"
    arguments: Arguments = field(default_factory=dict)


@dataclass(frozen=True)
class SchedulerKeys(keys.Part):
    """How the learning rate changes, update by update.

    name = "cosine"  `constant`, `linear` (down to `floor`), `cosine` (the same as a curve), a class of
        `torch.optim.lr_scheduler` that needs no metric, or your own function of the optimizer
    arguments = {}  for a class of torch or your own function
    warmup = 10  number of updates in which the rate rises to its full value, with one of the first three
    steps = 100  the update at which `linear` and `cosine` end | `train.steps`
    floor = 0.1  the rate at which these end, as a fraction of the full rate
    """

    key, known = "scheduler", SCHEDULERS
    name: Annotated[str, keys.named(SCHEDULERS)] = "constant"
    arguments: Arguments = field(default_factory=dict)
    warmup: Count = 0
    steps: Whole | None = None
    floor: Annotated[float, keys.share(below=False)] = 0.0


@dataclass(frozen=True)
class Layout:
    """The devices and the schedule. With `plan = "auto"`, the planner considers only the schedule and microbatches
    given here, if any.

    devices = ["cpu", "cpu", "cpu", "cpu"]  a number, or a list such as `["cuda:0", "cuda:1"]`; under torchrun one rank
        for each
    memory = "24GiB"  memory of each device that a plan may use, such as `"24GiB"`, or a list
        | the memory of the GPU; no limit on the CPU
    plan = "auto"  `"auto"`, or a file that `gapless plan --write` wrote; it sets the five keys below | none
    schedule = "zb-h1"  a name from `gapless schedules` | `1f1b`; on GPUs `zb-v` where it fits
    microbatches = 8  the number of parts that a minibatch is cut into, at most one per sample | needed without a plan
    stages_per_device = 2  stages on each device | the default of the schedule
    partition = [3, 3, 3, 2]  layers per stage; not for a traced model
        | balanced by parameters; a traced model is cut by estimated times
    remat = "none"  `"none"`, `"stage"`, `"layer"`, or a list with one of these per stage | none
    offload = "activations"  `"none"`, `"activations"`, or a list with one of these per stage: what is kept in host
        memory meanwhile; with `plan = "auto"` a single word, and the plan chooses the stages | none
    overlap = "auto"  an optimizer step that does not wait for the other devices: `true`, `false`, or `"auto"`, on if
        the schedule gains by it (`zb-h2`, `zb-v`, `auto`), all devices are CPUs without a limit in `memory`,
        `train.precision` is `float32` and the optimizer is torch's. The results are the same
    threads = 1  CPU threads of each device. The last bits of results may depend on it
        | the cores of the machine divided by its devices; a resumed run keeps its number
    timeout = 120  under torchrun: seconds without a heartbeat or progress of a rank before all ranks give up
    """

    devices: Annotated[int | tuple[str, ...], keys.devices] = 4
    memory: Annotated[int | str | tuple[int | str, ...], keys.memory] | None = None
    plan: Text | None = None
    schedule: Annotated[str, keys.schedule] | None = None
    microbatches: Whole | None = None
    stages_per_device: Whole | None = None
    partition: Counts | None = None
    remat: Annotated[Remat | tuple[Remat, ...], keys.of_stages(*get_args(Remat))] | None = None
    offload: Annotated[Offload | tuple[Offload, ...], keys.of_stages("none", "activations")] = "none"
    overlap: Annotated[bool | Literal["auto"], keys.overlap] = False
    threads: Whole | None = None
    timeout: Positive = 600.0


@dataclass(frozen=True)
class TrainKeys:
    """The training loop.

    steps = 100  number of updates
    clip = 1.0  the norm that gradients are clipped to | none
    seed = 0  the seed of everything random
    precision = "bf16"  `float32`; `bf16`, autocast to bfloat16; `fp16`, autocast to float16 with a loss scaler, in one
        process
    accumulate = 1  minibatches in one update; their gradients are averaged
    skip = 3  how many updates in a row may be skipped because the loss is not finite, before training ends
    """

    steps: Whole = 100
    clip: Positive | None = None
    seed: Count = 0
    precision: Annotated[str, keys.one_of("float32", "bf16", "fp16")] = "float32"
    accumulate: Whole = 1
    skip: Count = 0


@dataclass(frozen=True)
class EvaluateKeys(keys.Part):
    """The loss on held-out data.

    every = 50  evaluate after this many updates | never
    batches = 8  minibatches per evaluation
    held_out = 0.1  the fraction at the end of the data that is held out, if `evaluate.name` is not given
    name = "text"  other data, as for `data.name`; needed if `data` is your own function | the held-out part of `data`
    arguments = { files = "valid.txt", context = 64 }  a table that is passed to it by name
    patience = 5  stop after this many evaluations without improvement | no early stop
    """

    key, known = "evaluate", DATA
    every: Whole | None = None
    batches: Whole = 8
    held_out: Annotated[float, keys.share(below=True)] = 0.1
    name: DataName | None = None
    arguments: Arguments = field(default_factory=dict)
    patience: Whole | None = None


@dataclass(frozen=True)
class CheckpointKeys:
    """What is saved for resuming. A run also saves at its end, on SIGTERM and on Ctrl-C.

    every = 100  save after this many updates | by time
    minutes = 10  save after this many minutes | 10, unless `every` is given
    keep = 2  how many of the latest checkpoints are kept
    best = true  also keep the one with the best evaluation
    background = true  write from a copy, in a separate thread, while training continues
    """

    every: Whole | None = None
    minutes: Positive | None = None
    keep: Whole = 2
    best: Truth = True
    background: Truth = True


@dataclass(frozen=True)
class RunKeys:
    """The folder of a run, and its logs.

    folder = "runs/my-run"  the run's folder: its metrics, checkpoints and report. A run found there is resumed
        | `runs/` and the name of the config, in the current folder
    timeline = 20  measure the timeline of every n-th step; 0 for never. The first steps are not measured
    tensorboard = true  write event files for TensorBoard | if `tensorboard` is installed
    wandb = "my-project"  log to this project of Weights & Biases | no
    report = true  write `report.html` at the end
    """

    folder: Text | None = None
    timeline: Count = 20
    tensorboard: Truth | None = None
    wandb: Text | None = None
    report: Truth = True


TABLES: dict[str, type] = {
    "model": ModelKeys,
    "data": DataKeys,
    "loss": LossKeys,
    "optimizer": OptimizerKeys,
    "scheduler": SchedulerKeys,
    "pipeline": Layout,
    "train": TrainKeys,
    "evaluate": EvaluateKeys,
    "checkpoint": CheckpointKeys,
    "run": RunKeys,
}
