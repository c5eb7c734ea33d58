"""A config is a TOML file that says what to train: a model, its data, its loss, its optimizer, and on which devices.

    [model]
    name = "gpt"                    # or one's own: "my_models.py:make", "package.module:make"
    arguments = { width = 64, depth = 8 }

    [data]
    name = "python-source"
    minibatch = 16

    [pipeline]
    devices = 4
    plan = "auto"

Every fault is told at once, with its key and what is allowed there.
"""

import inspect
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from gapless import units
from gapless.errors import ConfigError, ScheduleError, printable
from gapless.schedule.recipes import find_recipe
from gapless.stage.stage import Remat
from gapless.user_file import read_user_file

MODELS = {
    "gpt": "gapless.zoo.gpt:gpt",
    "resnet": "gapless.zoo.resnet:resnet",
    "transformer": "gapless.zoo.transformer:transformer",
    "unet": "gapless.zoo.unet:unet",
}
DATA = {"python-source": "gapless.train.data:python_source"}
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
_OWN_LOSS = {"gpt": "next_token", "transformer": "translation"}  # of a model; those of all others are torch's
BROUGHT_BY_A_PLAN = ("schedule", "microbatches", "stages_per_device", "partition", "remat")
_REMAT = ("none", "stage", "layer")


@dataclass(frozen=True)
class Part:
    """What is made by calling a function with arguments.

    key    the table of the config that says so
    name   as it stands there
    where  "package.module:function", or "file.py:function"
    """

    key: str
    name: str
    where: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_own(self) -> bool:
        """A function of the user's, of which nothing is known."""
        return self.where == self.name


@dataclass(frozen=True)
class Layout:
    """[pipeline]. Beside plan = "auto", schedule and microbatches are all that is tried."""

    devices: int | tuple[str, ...] = 4
    memory: int | str | tuple[int | str, ...] | None = None
    plan: str | None = None  # "auto", or a file
    schedule: str | None = None
    microbatches: int | None = None
    stages_per_device: int | None = None
    partition: tuple[int, ...] | None = None
    remat: Remat | tuple[Remat, ...] | None = None


@dataclass(frozen=True)
class Config:
    """What a file says. `folder` is what files it names are looked for in."""

    folder: Path
    model: Part
    data: Part
    minibatch: int
    loss: Part | None
    optimizer: Part
    pipeline: Layout
    steps: int = 100
    clip: float | None = None
    seed: int = 0

    @property
    def num_devices(self) -> int:
        devices = self.pipeline.devices
        return devices if isinstance(devices, int) else len(devices)

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for part in (self.model, self.data, self.loss, self.optimizer) if part is not None)

    def changed(self, *, minibatch: int | None = None, steps: int | None = None, **pipeline: Any) -> "Config":
        """With what is not None instead. A plan takes the place of all that it brings itself."""
        given = {key: value for key, value in pipeline.items() if value is not None}
        if "plan" in given:
            given = {**dict.fromkeys(BROUGHT_BY_A_PLAN), **given}
        return replace(
            self,
            minibatch=self.minibatch if minibatch is None else minibatch,
            steps=self.steps if steps is None else steps,
            pipeline=replace(self.pipeline, **given),
        )


def read_config(path: str | Path) -> Config:
    """A config from its file; the folder of the file is where it finds what it names."""
    folder = Path(path).parent
    return read_user_file(path, lambda text: parse_config(text, folder), "a config", "is a TOML file", largest=2**20)


def parse_config(text: str, folder: Path) -> Config:
    """A config from its text; all faults are told at once."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"it is not TOML: {str(error)[:200]}") from None
    faults: list[str] = []
    tables = _Table("", data, faults)
    tables.allow("model", "data", "loss", "optimizer", "pipeline", "train")
    model = _part(tables.table("model"), MODELS, "name", "arguments")
    rows = tables.table("data")
    source = _part(rows, DATA, "name", "arguments", "minibatch")
    usual = _OWN_LOSS.get(model.name, "cross_entropy") if model.name in MODELS else None
    loss = None
    if "loss" in data or usual is not None:
        loss = _part(tables.table("loss", {}), LOSSES, "name", "arguments", usual=usual)
        for key in sorted({"size_average", "reduce"} & set(loss.arguments)):
            if loss.where.startswith("torch.nn.functional:"):
                tables.fault(f"loss.arguments has {key!r}, which torch has replaced: use reduction, as 'mean' or 'sum'")
    optimizer = _part(tables.table("optimizer", {}), OPTIMIZERS, "name", "arguments", usual="AdamW")
    training = tables.table("train", {})
    training.allow("steps", "clip", "seed")
    config = Config(
        folder,
        model,
        source,
        rows.get("minibatch", _whole(), needed="samples in a step, as 16"),
        loss,
        optimizer,
        _layout(tables.table("pipeline", {})),
        training.get("steps", _whole(), 100),
        training.get("clip", _positive),
        training.get("seed", _whole(0), 0),
    )
    if faults:
        raise ConfigError("; ".join(faults))
    return config


def _layout(table: "_Table") -> Layout:
    table.allow(*Layout.__dataclass_fields__)
    made = Layout(
        devices=table.get("devices", _devices, 4),
        memory=table.get("memory", _memory),
        plan=table.get("plan", _text),
        schedule=table.get("schedule", _schedule),
        microbatches=table.get("microbatches", _whole()),
        stages_per_device=table.get("stages_per_device", _whole()),
        partition=table.get("partition", _listed(_whole(), "a list of whole numbers, as [3, 3, 2]")),
        remat=table.get("remat", _remat),
    )
    if made.plan == "auto":
        for key in ("stages_per_device", "partition", "remat"):
            if getattr(made, key) is not None:
                table.fault(f"pipeline.{key} is given, but plan = 'auto' chooses it: leave one of them out")
    return made


def _part(table: "_Table", known: Mapping[str, str], *keys: str, usual: str | None = None) -> Part:
    """A name from the list, or one's own function, with its arguments."""
    table.allow(*keys)

    def named(value: Any) -> str:
        name: str = _text(value)
        module, colon, function = name.rpartition(":")
        if not (colon and module and function.isidentifier()) and name not in known:
            alike = {each.lower(): each for each in known}
            near = get_close_matches(name.lower(), alike, n=1)
            allowed = f"it is {', '.join(known)}, or your own as 'file.py:function'"
            hint = f"did you mean {alike[near[0]]}?" if near else allowed
            raise ConfigError(f"is {name[:60]!r}, which is not known; {hint}")
        return name

    needed = f"{' or '.join(list(known)[:4])}, or 'file.py:function'"
    name = table.get("name", named, usual, needed=needed) or ""
    name = {where: short for short, where in known.items()}.get(name, name)  # the same, and as much is known of it
    return Part(table.key, name, known.get(name, name), table.get("arguments", _arguments, {}))


# -- reading ----------------------------------------------------------------------------------------------------------

_Reader = Callable[[Any], Any]


class _Table:
    """A table of the file. It is read on after a fault, so that all of them can be told at once."""

    def __init__(self, key: str, data: Mapping[str, Any], faults: list[str]) -> None:
        self.key, self._data, self._faults = key, data, faults

    def fault(self, text: str) -> None:
        self._faults.append(text)

    def allow(self, *keys: str) -> None:
        for key in self._data:
            if key not in keys:
                near = get_close_matches(key, keys, n=1)
                hint = f"did you mean {near[0]}?" if near else f"{self.key or 'a config'} takes {', '.join(keys)}"
                self.fault(f"{self._path(key)} is not understood; {hint}")

    def table(self, key: str, default: Mapping[str, Any] | None = None) -> "_Table":
        found = self._data.get(key, default)
        if not isinstance(found, Mapping):
            given = f"[{key}] is missing" if found is None else f"{key} is {found!r:.40}, but it must be a table"
            self.fault(f"{given}: write [{key}] and below it name = ...")
            return _Table(key, {}, [])  # which has no more to complain about
        return _Table(key, found, self._faults)

    def get(self, key: str, read: _Reader, default: Any = None, *, needed: str | None = None) -> Any:
        """What `read` makes of a value; the default where there is none, or none that can be read."""
        try:
            if key in self._data:
                return read(self._data[key])
            if needed is not None and default is None:
                raise ConfigError(f"is missing: {needed}")
        except ConfigError as error:
            self.fault(f"{self._path(key)} {error}")
        return default

    def _path(self, key: str) -> str:
        shown = printable(key[:60])
        return f"{self.key}.{shown}" if self.key else shown


def _must(fits: Callable[[Any], bool], be: str, made: _Reader = lambda value: value) -> _Reader:
    """Refuses a value that does not fit; it must `be` something else."""

    def read(value: Any) -> Any:
        if not fits(value):
            raise ConfigError(f"is {value!r:.40}, but it must be {be}")
        return made(value)

    return read


_text = _must(lambda value: isinstance(value, str) and value != "", "a text")
_positive = _must(lambda value: type(value) in (int, float) and 0 < value < math.inf, "a number above 0", float)
_arguments = _must(lambda value: isinstance(value, Mapping), "a table, as { width = 64, depth = 8 }")


def _whole(least: int = 1) -> _Reader:
    return _must(lambda value: type(value) is int and least <= value < 2**53, f"a whole number of at least {least}")


def _listed(read: _Reader, what: str) -> _Reader:
    return _must(lambda value: isinstance(value, list) and value != [], what, lambda value: tuple(map(read, value)))


def _devices(value: Any) -> Any:
    read = _whole() if type(value) is int else _listed(_device, "a number, or a list as ['cuda:0', 'cuda:1']")
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
    name: str = _text(value)
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
