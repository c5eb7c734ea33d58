"""All benchmarks in one go, for `python -m benchmarks all`: which, with which options, and what is kept of them.

    FOLDER/0001/run.json          what this run is made of, and whether it is finished
    FOLDER/0001/emulated.json     the outcome of a part
    FOLDER/0002/...               the next run, which is compared with the last finished one

Every part is stored as soon as it has ended. A run that was stopped is unfinished: the same command goes on with it.
"""

import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import benchmark_module
from benchmarks.runner.environment import environment
from benchmarks.runner.outcome import Outcome, now, outcome, read
from benchmarks.runner.rounds import Progress
from gapless.errors import ConfigError, GaplessError


@dataclass(frozen=True)
class Entry:
    """A benchmark with options other than its defaults; `quick` ones take seconds, and their figures mean little."""

    benchmark: str
    quick: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)


_EMULATED: dict[str, Any] = {"devices": 2, "microbatches": 4, "milliseconds": 1.0, "rounds": 2, "schedules": ("1f1b",)}
ENTRIES: Mapping[str, Entry] = {
    "emulated": Entry("emulated", _EMULATED),
    "emulated-20ms": Entry("emulated", _EMULATED | {"peer": False}, {"milliseconds": 20.0}),
    "emulated-1ms": Entry("emulated", _EMULATED | {"peer": False}, {"milliseconds": 1.0}),
    "emulated-ranks": Entry("emulated", _EMULATED | {"torchrun": True}, {"torchrun": True}),
    "peers": Entry("peers", {"microbatches": 4, "layers": 2, "schedules": ("1f1b",), "sizes": ("light",), "rounds": 2}),
    "matrix": Entry("matrix", {"devices": ("2",), "microbatches": ("8",), "times": ("1",), "rounds": 2}),
    "largest": Entry(
        "largest", {"models": ("Transformer",), "predicted": False, "width": 16, "layers": 3, "devices": 2}
    ),
    "throughput": Entry(
        "throughput", {"milliseconds": 8.0, "devices": ("2",), "microbatches": ("1", "4"), "slow": False, "rounds": 2}
    ),
    "breakdown": Entry("breakdown", {"width": 16, "depth": 2, "devices": 2, "milliseconds": 1.0, "rounds": 2}),
    "bubbles": Entry("bubbles", {"lines": 1}),
    "overhead": Entry("overhead", {"depth": 1, "width": 16, "rounds": 2}),
    "tiny": Entry("tiny", {"microbatches": 2, "steps": 1, "rounds": 2}),
    "split": Entry("split", {"times": 2, "rounds": 2}),
    "timeline": Entry("timeline", {"devices": 2, "microbatches": 2, "steps": 1, "rounds": 2}),
    "saving": Entry("saving", {"width": 16, "depth": 1, "rounds": 2}),
    "scale": Entry("scale", {"smallest": 4, "largest": 8}),
    "replicas": Entry("replicas", {"devices": 4, "milliseconds": 2.0, "rounds": 2}),
    "plan": Entry("plan", {"quick": True, "rounds": 1, "seconds": 0.01}),
    "staleness": Entry("staleness", {"devices": 2, "steps": 5, "batch": 2, "width": 4, "seeds": 1}, {"seeds": 3}),
    "compile": Entry(
        "compile", {"devices": 1, "depth": 1, "width": 16, "steps": 1, "rounds": 2, "backend": "aot_eager"}
    ),
    "gpu": Entry("gpu", {"rounds": 2}),
    "plan-fit": Entry("plan", {"fit": True}, {"fit": True}),
}


def command(benchmark: str, options: Mapping[str, Any]) -> str:
    """What measures it again: the options that are not the defaults, but for files."""
    words = ["python", "-m", "benchmarks", benchmark]
    for parameter in inspect.signature(benchmark_module(benchmark).run).parameters.values():
        value = options.get(parameter.name, parameter.default)
        if parameter.name == "progress" or value == parameter.default or isinstance(value, Path):
            continue
        flag = parameter.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", ",".join(value) if isinstance(value, tuple) else f"{value}".removesuffix(".0")]
    return " ".join(words)


def defaults(benchmark: str) -> dict[str, Any]:
    """The options of a benchmark, as they are if nobody says anything."""
    parameters = inspect.signature(benchmark_module(benchmark).run).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.name != "progress"}


def measured(benchmark: str, options: Mapping[str, Any], progress: Progress) -> Outcome:
    """Run it. One that can't run here says why in its outcome."""
    module: Any = benchmark_module(benchmark)
    given = defaults(benchmark) | dict(options)
    told = command(benchmark, given)
    try:
        found = module.run(**given, progress=progress)
    except GaplessError as error:
        return Outcome(benchmark, told, now(), environment(), skipped=str(error))
    return outcome(benchmark, told, environment(), plain(benchmark, given, found))


def plain(benchmark: str, given: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Options and findings together, as JSON has them; where files were written is not a part of it."""
    files = {option: None for option, value in given.items() if isinstance(value, Path)}
    made: dict[str, Any] = json.loads(json.dumps({"benchmark": benchmark, **given, **found, **files}, default=str))
    return made


class Runs:
    """Those in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file: give a folder for the results")
        folder.mkdir(parents=True, exist_ok=True)

    def open(self, keys: Sequence[str], *, quick: bool) -> tuple[Path, bool]:
        """The unfinished run of the same parts on the same machine, or a new one; and whether it goes on."""
        wanted = {"quick": quick, "parts": list(keys), "environment": environment()}
        there = self._numbered()
        if there and (last := _manifest(there[-1])) is not None and not last.pop("finished") and last == wanted:
            return there[-1], True
        folder = self._folder / f"{int(there[-1].name) + 1 if there else 1:04}"
        folder.mkdir()
        _write(folder, wanted | {"finished": False})
        return folder, False

    def close(self, run: Path) -> None:
        """It is finished."""
        _write(run, {**(_manifest(run) or {}), "finished": True})

    def before(self, run: Path) -> Path | None:
        """The last finished one of the same kind before it."""
        mine = _manifest(run) or {}
        for folder in reversed([each for each in self._numbered() if each.name < run.name]):
            other = _manifest(folder)
            if other is not None and other["finished"] and other["quick"] == mine["quick"]:
                return folder
        return None

    def _numbered(self) -> list[Path]:
        return sorted(each for each in self._folder.iterdir() if each.is_dir() and each.name.isdigit())


def _manifest(run: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((run / "run.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if {"quick", "parts", "environment", "finished"} <= found.keys() else None


def _write(run: Path, values: Mapping[str, Any]) -> None:
    aside = run / "run.json.part"
    aside.write_text(json.dumps(values, indent=1) + "\n", "utf-8")
    os.replace(aside, run / "run.json")


def stored(run: Path) -> dict[str, Outcome]:
    """The outcomes in a folder, by their parts, in the order of the suite."""
    found = {file.stem: read(file) for file in sorted(run.glob("*.json")) if file.name != "run.json"}
    order = list(ENTRIES)
    return dict(sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def run_all(
    run: Path, keys: Sequence[str], *, quick: bool, progress: Progress, done: Callable[[str, Outcome], None]
) -> dict[str, Outcome]:
    """All parts that are not stored yet, one after another; each is stored as soon as it is there."""
    found = {key: each for key, each in stored(run).items() if key in keys}
    for number, key in enumerate(keys):
        if key in found:
            continue
        entry = ENTRIES[key]
        at = f"[{number + 1} of {len(keys)}] {key}"
        progress(at)
        options = dict(entry.quick if quick else entry.options)
        if "keep" in defaults(entry.benchmark):  # so that it goes on in the middle
            options["keep"] = run / f"{key}.part"
        made = measured(
            entry.benchmark,
            options,
            lambda line, at=at: progress(f"{at}: {line}" if line else at),  # type: ignore[misc]
        )
        made.write(run / f"{key}.json")
        found[key] = made
        done(key, made)
    return {key: found[key] for key in keys}
