"""The tables of a config. Each is a dataclass, and each key a field of it: how it is read, its default, and its line in
the manual, once.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gapless import units
from gapless.errors import ConfigError, ScheduleError
from gapless.schedule.recipes import find_recipe
from gapless.stage.stage import Remat
from gapless.train.config.keys import arguments, key, listed, named, one_of, positive, share, text, truth, whole

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
_REMAT = ("none", "stage", "layer")


# -- readers of single keys -------------------------------------------------------------------------------------------


def _devices(value: Any) -> Any:
    read = whole() if type(value) is int else listed(_device, "a number, or a list as ['cuda:0', 'cuda:1']")
    return read(value)


def _device(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"cpu|cuda(:[0-9]{1,4})?", value):
        raise ConfigError(f"has {value!r:.40}, but a device is 'cpu', or as 'cuda:0'")
    return value


def _memory(value: Any) -> int | str | tuple[int | str, ...]:
    many: Sequence[Any] = value if isinstance(value, list) else [value]
    for each in many:
        units.read_bytes(each)
    return tuple(many) if isinstance(value, list) else value


def _schedule(value: Any) -> str:
    name: str = text(value)
    try:
        find_recipe(name)
    except ScheduleError as error:
        raise ConfigError(f"is {name[:60]!r}, but {error}") from None
    return name


def _remat(value: Any) -> Any:
    allowed = f"{', '.join(_REMAT)}, or a list with one of these per stage"
    for each in value if isinstance(value, list) and value else [value]:
        if each not in _REMAT:
            raise ConfigError(f"is {each!r:.40}, but it must be {allowed}")
    return tuple(value) if isinstance(value, list) else value


# -- the tables -------------------------------------------------------------------------------------------------------

_ARGUMENTS = "a table that is passed to it by name"
_OWN = 'or your own, as `"file.py:function"` or `"package.module:function"`'


@dataclass(frozen=True)
class ModelKeys:
    """What is trained."""

    name: str = key(
        named(MODELS),
        "`gpt`, `resnet`, `transformer` or `unet`; `huggingface`, a config or folder of `transformers`; "
        f"{_OWN}: it returns a module or a list of layers",
        "",
        example='"gpt"',
        needed="gpt or resnet or transformer or unet, or 'file.py:function'",
    )
    arguments: Mapping[str, Any] = key(arguments, _ARGUMENTS, {}, example="{ width = 64, depth = 8, heads = 4 }")


@dataclass(frozen=True)
class DataKeys:
    """What it is trained on."""

    name: str = key(
        named(DATA),
        f"`python-source`, `text`, `records` or `tokens`, {_OWN}: it returns batches",
        "",
        example='"python-source"',
        needed="python-source or text or records or tokens, or 'file.py:function'",
    )
    arguments: Mapping[str, Any] = key(arguments, _ARGUMENTS, {}, example="{ context = 64 }")
    minibatch: int = key(
        whole(),
        "samples in a step, those of all replicas together",
        1,
        example="16",
        needed="samples in a step, as 16",
    )
    tokenizer: str = key(
        text, '`"bytes"`, or a `tokenizer.json` (needs the package `tokenizers`)', "bytes", example='"bytes"'
    )
    passes: int | None = key(
        whole(),
        "training ends after so many passes over the data, if that comes before `train.steps`",
        example="1",
        usual="no limit",
    )


@dataclass(frozen=True)
class LossKeys:
    """What is made smaller."""

    name: str | None = key(
        named(LOSSES),
        "`next_token`, `translation`, a loss of `torch.nn.functional` such as `cross_entropy`, or your own function "
        "of outputs and target",
        example='"next_token"',
        usual="for `gpt` `next_token`, for `transformer` `translation`, for `resnet` and `unet` `cross_entropy`; for "
        "any other model the loss it returns",
    )
    arguments: Mapping[str, Any] = key(arguments, _ARGUMENTS, {}, example="{}")


@dataclass(frozen=True)
class OptimizerKeys:
    """What changes the weights."""

    name: str = key(
        named(OPTIMIZERS),
        "a class of `torch.optim` (but not `LBFGS` and `SparseAdam`), or a function of your own that takes the "
        "parameters",
        "AdamW",
        example='"AdamW"',
    )
    arguments: Mapping[str, Any] = key(arguments, _ARGUMENTS, {}, example="{ lr = 3e-3 }")


@dataclass(frozen=True)
class SchedulerKeys:
    """How the learning rate changes, update by update."""

    name: str = key(
        named(SCHEDULERS),
        "`constant`, `linear` (down to `floor`), `cosine` (the same in a curve), a class of `torch.optim.lr_scheduler` "
        "that needs no measure, or a function of your own that takes the optimizer",
        "constant",
        example='"cosine"',
    )
    arguments: Mapping[str, Any] = key(arguments, "for a class of torch or your own function", {}, example="{}")
    warmup: int = key(
        whole(0), "updates in which the rate rises to its full height, with one of the first three", 0, example="10"
    )
    steps: int | None = key(
        whole(), "the update at which `linear` and `cosine` end", example="100", usual="`train.steps`"
    )
    floor: float = key(share(below=False), "where these end, as a share of the full rate", 0.0, example="0.1")


@dataclass(frozen=True)
class Layout:
    """On what it is trained, and in which order. Beside `plan = "auto"` a schedule and microbatches are all that is
    tried.
    """

    devices: int | tuple[str, ...] = key(
        _devices,
        'a number, or a list as `["cuda:0", "cuda:1"]`; under torchrun one rank for each',
        4,
        example='["cpu", "cpu", "cpu", "cpu"]',
    )
    memory: int | str | tuple[int | str, ...] | None = key(
        _memory,
        'memory of each device that a plan may use, as `"24GiB"`, or a list',
        example='"24GiB"',
        usual="what a GPU has; none on the CPU",
    )
    plan: str | None = key(
        text,
        '`"auto"`, or a file that `gapless plan --write` wrote; it brings the five keys below',
        example='"auto"',
        usual="none",
    )
    schedule: str | None = key(_schedule, "a name from `gapless schedules`", example='"zb-h1"', usual="`1f1b`")
    microbatches: int | None = key(
        whole(),
        "into how many parts a minibatch is cut, at most its samples",
        example="8",
        usual="needed without a plan",
    )
    stages_per_device: int | None = key(whole(), "stages on each device", example="2", usual="what the schedule needs")
    partition: tuple[int, ...] | None = key(
        listed(whole(), "a list of whole numbers, as [3, 3, 2]"),
        "layers per stage",
        example="[3, 3, 3, 2]",
        usual="balanced by parameters",
    )
    remat: Remat | tuple[Remat, ...] | None = key(  # noqa: RUF009
        _remat, '`"none"`, `"stage"`, `"layer"`, or a list with one of these per stage', example='"none"', usual="none"
    )
    threads: int | None = key(
        whole(),
        "CPU threads of each device. The last bits of a number may depend on it",
        example="1",
        usual="the cores of the machine, shared by its devices; what it had for a run that goes on",
    )
    timeout: float = key(
        positive,
        "under torchrun: seconds without a sign of life or progress from some rank before all give up",
        600.0,
        example="120",
    )


@dataclass(frozen=True)
class TrainKeys:
    """How long and how."""

    steps: int = key(whole(), "number of updates", 100, example="100")
    clip: float | None = key(positive, "the norm that gradients are clipped to", example="1.0", usual="none")
    seed: int = key(whole(0), "the seed of everything random", 0, example="0")
    precision: str = key(
        one_of("float32", "bf16", "fp16"),
        "`float32`; `bf16`, autocast to bfloat16; `fp16`, autocast to float16 with a loss scaler, in one process",
        "float32",
        example='"bf16"',
    )
    accumulate: int = key(whole(), "minibatches in one update; their gradients are averaged", 1, example="1")
    skip: int = key(
        whole(0),
        "how many updates in a row are left out because the loss is not finite, before training ends",
        0,
        example="3",
    )


@dataclass(frozen=True)
class EvaluateKeys:
    """The loss on data that is not trained on."""

    every: int | None = key(whole(), "evaluate after so many updates", example="50", usual="never")
    batches: int = key(whole(), "minibatches in an evaluation", 8, example="8")
    held_out: float = key(
        share(below=True),
        "the share at the end of the data that is kept for it, where `evaluate.name` is not given",
        0.1,
        example="0.1",
    )
    name: str | None = key(
        named(DATA),
        "other data for it, as for `data.name`; needed for data of your own",
        example='"text"',
        usual="what is held out of `data`",
    )
    arguments: Mapping[str, Any] = key(arguments, _ARGUMENTS, {}, example='{ files = "valid.txt", context = 64 }')
    patience: int | None = key(
        whole(), "stop after so many evaluations without a better one", example="5", usual="no early stop"
    )


@dataclass(frozen=True)
class CheckpointKeys:
    """What is kept, to go on later. A run saves at its end too, on SIGTERM and on Ctrl-C."""

    every: int | None = key(whole(), "save after so many updates", example="100", usual="at the end only")
    minutes: float | None = key(positive, "save after so many minutes", example="10", usual="at the end only")
    keep: int = key(whole(), "how many of the latest are kept", 2, example="2")
    best: bool = key(truth, "keep the one with the best evaluation too", True, example="true")
    background: bool = key(
        truth, "write from a copy, in a thread of its own, while training goes on", False, example="false"
    )


@dataclass(frozen=True)
class RunKeys:
    """Where it is written down, and how it is watched."""

    folder: str | None = key(
        text,
        "the run's folder: its metrics, checkpoints and report. A run that is found there goes on",
        example='"runs/my-run"',
        usual="`runs/` and the name of the config, in the current folder",
    )
    timeline: int = key(
        whole(0),
        "measure who does what in every n-th step; 0 for never. The first steps are not measured",
        20,
        example="20",
    )
    tensorboard: bool | None = key(
        truth, "write for TensorBoard", example="true", usual="where `tensorboard` is installed"
    )
    wandb: str | None = key(text, "log to this project of Weights & Biases", example='"my-project"', usual="no")
    report: bool = key(truth, "write `report.html` at the end", True, example="true")


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
