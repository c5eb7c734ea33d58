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

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gapless.errors import ConfigError
from gapless.train.config import tables
from gapless.train.config.keys import Part, read_tables
from gapless.user_file import read_user_file

_OWN_LOSS = {"gpt": "next_token", "transformer": "translation", "resnet": "cross_entropy", "unet": "cross_entropy"}
BROUGHT_BY_A_PLAN = ("schedule", "microbatches", "stages_per_device", "partition", "remat")


@dataclass(frozen=True)
class Config:
    """What a file says. `folder` is what files it names are looked for in, `name` that of the file."""

    folder: Path
    name: str
    model: tables.ModelKeys
    data: tables.DataKeys
    loss: tables.LossKeys | None
    optimizer: tables.OptimizerKeys
    scheduler: tables.SchedulerKeys
    pipeline: tables.Layout
    train: tables.TrainKeys
    evaluate: tables.EvaluateKeys
    checkpoint: tables.CheckpointKeys
    run: tables.RunKeys

    @property
    def validation(self) -> tables.EvaluateKeys | None:
        """Other data to evaluate on, if there is some."""
        return None if self.evaluate.name is None else self.evaluate

    @property
    def num_devices(self) -> int:
        devices = self.pipeline.devices
        return devices if isinstance(devices, int) else len(devices)

    @property
    def parts(self) -> tuple[Part, ...]:
        found = (self.model, self.data, self.loss, self.optimizer, self.scheduler, self.validation)
        return tuple(part for part in found if part is not None)

    def changed(self, *, minibatch: int | None = None, steps: int | None = None, **pipeline: Any) -> "Config":
        """With what is not None instead. A plan takes the place of all that it brings itself."""
        given = {key: value for key, value in pipeline.items() if value is not None}
        if "plan" in given:
            given = {**dict.fromkeys(BROUGHT_BY_A_PLAN), **given}
        return replace(
            self,
            data=self.data if minibatch is None else replace(self.data, minibatch=minibatch),
            train=self.train if steps is None else replace(self.train, steps=steps),
            pipeline=replace(self.pipeline, **given),
        )

    def as_json(self) -> dict[str, dict[str, Any]]:
        """The tables with all that holds, also what the file leaves out; what is None there is left out here."""
        found = {name: {} if (table := getattr(self, name)) is None else asdict(table) for name in tables.TABLES}
        return {name: {key: value for key, value in each.items() if value is not None} for name, each in found.items()}


def read_config(path: str | Path, settings: Sequence[str] = ()) -> Config:
    """A config from its file; the folder of the file is where it finds what it names. Of `settings` each takes the
    place of what the file says: "train.steps=50".
    """
    file = Path(path)

    def parse(text: str) -> Config:
        return parse_config(text, file.parent, file.stem, settings)

    return read_user_file(path, parse, "a config", "is a TOML file", largest=2**20)


def parse_config(text: str, folder: Path, name: str = "run", settings: Sequence[str] = ()) -> Config:
    """A config from its text; all faults are told at once."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"it is not TOML: {str(error)[:200]}") from None
    for setting in settings:
        _set(data, setting)
    found = read_tables(data, tables.TABLES)
    usual = _OWN_LOSS.get(found["model"].name)
    if "loss" not in data and usual is None:
        found["loss"] = None
    elif found["loss"].name is None:
        found["loss"] = replace(found["loss"], name=usual)
    config = Config(folder, name, **found)
    if faults := list(_contradictions(config)):
        raise ConfigError("; ".join(faults))
    return config


def _set(data: dict[str, Any], setting: str) -> None:
    """`a.b=c` in place of what stands there. A value that is no TOML is taken as a text: `pipeline.schedule=zb-v`."""
    path, equals, value = setting.partition("=")
    words = [word.strip() for word in path.split(".")]
    if not equals or len(words) < 2 or not all(words):
        raise ConfigError(f"--set {setting[:60]!r} is not understood: write a key and its value, as train.steps=50")
    table: Any = data
    for word in words[:-1]:
        table = table.setdefault(word, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {setting[:60]!r}: {word} is a value in the config, not a table")
    try:
        (table[words[-1]],) = tomllib.loads(f"value = {value}").values()
    except (tomllib.TOMLDecodeError, RecursionError, ValueError):
        table[words[-1]] = value.strip()


def _contradictions(config: Config) -> Iterator[str]:
    """Keys that are right one by one, but not together."""
    layout, loss, rate, evaluate = config.pipeline, config.loss, config.scheduler, config.evaluate
    if loss is not None:
        if not loss.name:
            yield "loss.name is missing: next_token or cross_entropy, or 'file.py:function'"
        for key in sorted({"size_average", "reduce"} & set(loss.arguments)):
            if loss.where.startswith("torch.nn.functional:"):
                yield f"loss.arguments has {key!r}, which torch has replaced: use reduction, 'mean' or 'sum'"
    if layout.plan == "auto":
        for key in ("stages_per_device", "partition", "remat"):
            if getattr(layout, key) is not None:
                yield f"pipeline.{key} is given, but plan = 'auto' chooses it: leave one of them out"
        if isinstance(layout.offload, tuple):
            yield "pipeline.offload lists stages, but plan = 'auto' chooses them: write offload = 'activations'"
    if layout.overlap is True and (precision := config.train.precision) != "float32":
        yield (
            f"pipeline.overlap is true, but train.precision is {precision}, which keeps casts of the weights, so every "
            "step would wait: leave one of them out"
        )
    if rate.name not in tables.OUR_RATES:
        for key, usual in (("warmup", 0), ("steps", None), ("floor", 0.0)):
            if getattr(rate, key) != usual:
                ours = ", ".join(tables.OUR_RATES)
                yield f"scheduler.{key} is for {ours}, but scheduler.name is {rate.name}: leave one out"
    elif rate.arguments:
        yield f"scheduler.arguments is given, but {rate.name} takes none: use warmup, steps and floor"
    if evaluate.every is not None and config.validation is None:
        if config.data.is_own:
            yield "evaluate.name is missing: nothing can be held out of your own data, so name other data"
        elif evaluate.held_out == 0:
            yield "evaluate.held_out is 0, so there is nothing to evaluate on: make it larger, or give evaluate.name"
    if evaluate.patience is not None and evaluate.every is None:
        yield "evaluate.patience is given, but evaluate.every is not: set how often to evaluate"
