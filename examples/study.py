"""What the studies in this folder share: options, results that outlive a stop, a page, and a section of the docs.

A study is a list of runs. The result of each goes to FOLDER/NAME.json as soon as it is there, so the same command goes
on after a stop; a long run goes on from a checkpoint. When all runs are there, FOLDER/NAME.html is written from the
JSON. `python examples/studies.py` makes docs/studies.md in the same way.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

import gapless
from gapless.checkpoint import Checkpoints
from gapless.stage.intra_op import intra_op_threads
from gapless.view import curves

Found = Mapping[str, Any]
Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # headings and rows
Number = TypeVar("Number", int, float)
POINTS = 40  # of a curve
SURE = 3  # standard errors of a mean that is more than chance: with few runs, two are often chance
_SHOW, _SAVE = 5.0, 30.0  # seconds


@dataclass(frozen=True)
class Report:
    """What the figures say: sentences, tables and curves, all of them made from the figures."""

    answer: Sequence[str]
    tables: Sequence[Table]
    notes: Sequence[str]
    xs: Sequence[float]
    panels: Sequence[curves.Panel]
    axes: tuple[str, str]
    details: Sequence[Table] = ()  # on the page alone


@dataclass(frozen=True)
class Study:
    """`settings` is a frozen dataclass whose fields are the options; `quick` has values for a test of a few seconds."""

    name: str
    title: str
    question: str
    settings: Any
    quick: Any
    run: Callable[[Any, "Results"], None]
    report: Callable[[Found], Report]

    @property
    def command(self) -> str:
        return f"python examples/{self.name}.py"

    def page(self, found: Found) -> str:
        """The results as one HTML file."""
        report = self.report(found)
        words = [each.replace("`", "") for each in (self.question, *report.answer, *report.notes, self._made(found))]
        return curves.render(self.title, words, report.xs, report.panels, report.axes, *report.tables, *report.details)

    def section(self, found: Found) -> str:
        """The results as a section of docs/studies.md."""
        report = self.report(found)
        parts = [f"## {self.title}", self.question, *_list(report.answer), *map(_markdown, report.tables)]
        parts += [*_list(report.notes), f"{self._made(found)} [The page with the curves](results/{self.name}.html)."]
        return "\n\n".join(parts)

    def _made(self, found: Found) -> str:
        changed = _options(found["settings"], asdict(self.settings))
        cpu = sum(run["cpu_seconds"] for run in found["runs"].values())
        machine = found["machine"]
        return (
            f"Made by `{self.command}{changed}`: {len(found['runs'])} runs, {cpu / 60:.1f} minutes of CPU time, on "
            f"{machine['cores']} shared cores, {machine['date']}, "
            f"with torch {machine['torch']} and Python {machine['python']}."
        )


def whole(found: Found, names: Callable[[int], Sequence[str]]) -> list[int]:
    """The seeds of which all runs are there, by the names of a seed's runs: a study may be shown before its end."""
    return [seed for seed in range(found["settings"]["seeds"]) if all(name in found["runs"] for name in names(seed))]


def option(default: Any, words: str) -> Any:
    """A field of a study's settings."""
    return field(default=default, metadata={"help": words})


def _list(sentences: Sequence[str]) -> list[str]:
    return ["\n".join(f"- {each}" for each in sentences)] if sentences else []


def _markdown(table: Table) -> str:
    lines = [table[0], ["---"] * len(table[0]), *table[1]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _options(settings: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    return "".join(
        f" --{name.replace('_', '-')} {value}" for name, value in settings.items() if value != usual.get(name)
    )


def machine() -> dict[str, Any]:
    """Where figures come from."""
    return {
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gapless": gapless.__version__,
        "date": date.today().isoformat(),
    }


class Results:
    """The runs of a study that are done, on disk after each of them."""

    def __init__(self, study: Study, settings: Any, folder: Path) -> None:
        self._path = folder / f"{study.name}.json"
        self._unfinished = folder / f"{study.name}.unfinished"
        self._study, self._begun, self._line = study, time.monotonic(), ""
        self._clocks, self.earlier = _clocks(), (0.0, 0.0)  # `earlier`: spent before the run under way was stopped
        self.found: dict[str, Any] = {"study": study.name, "settings": asdict(settings), "machine": machine()}
        self.found["runs"] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            kept = json.loads(self._path.read_text("utf-8"))
            if kept["settings"] != self.found["settings"]:
                raise gapless.GaplessError(
                    f"{self._path} has results of other settings ({_options(kept['settings'], {}).strip()}): give "
                    "another --folder, or remove the file"
                )
            self.found = kept

    def run(self, name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of a run; it is computed only if it is not there yet."""
        runs = self.found["runs"]
        if name not in runs:
            self._line = name
            self.show("begins")
            self._clocks, self.earlier = _clocks(), (0.0, 0.0)
            result = compute()
            times = dict(zip(("seconds", "cpu_seconds"), self.spent, strict=True))
            runs[name] = {**result, **{key: round(value, 1) for key, value in times.items()}}
            self._keep()
            shutil.rmtree(self._unfinished, ignore_errors=True)
            self.show("done")
        return runs[name]

    @property
    def spent(self) -> tuple[float, float]:
        """Seconds and CPU seconds of the run under way, with what it took before it was stopped."""
        wall, cpu = (
            now - then + before for now, then, before in zip(_clocks(), self._clocks, self.earlier, strict=True)
        )
        return wall, cpu

    @property
    def checkpoints(self) -> Path:
        """A folder for those of the run under way, and of no other run or settings."""
        which = json.dumps([self._line, self.found["settings"]])
        return self._unfinished / hashlib.sha256(which.encode()).hexdigest()[:12]

    def forget(self, name: str, key: str) -> None:
        """What later runs have needed of a run, and the page does not."""
        if self.found["runs"][name].pop(key, None) is not None:
            self._keep()

    def _keep(self) -> None:
        self._write(self._path, json.dumps(self.found, indent=1, ensure_ascii=False) + "\n")

    def show(self, words: str) -> None:
        """Progress, as a line."""
        print(f"{time.monotonic() - self._begun:6.0f} s  {self._line}: {words}", file=sys.stderr, flush=True)

    def finish(self) -> str:
        """The page is written; what to tell the user."""
        page = self._path.with_suffix(".html")
        self._write(page, self._study.page(self.found))
        answer = "\n".join(self._study.report(self.found).answer)
        return f"{answer}\n\nfigures: {self._path}\npage: {page}"

    @staticmethod
    def _write(path: Path, text: str) -> None:
        new = path.with_suffix(".new")
        new.write_text(text, encoding="utf-8", newline="\n")
        new.replace(path)


def train(
    results: Results,
    pipe: gapless.Pipeline,
    optimizer: Optimizer,
    batch: Callable[[int], tuple[Any, Any]],
    updates: int,
    *,
    accumulate: int = 1,
    clip: float | None = None,
    rate: Callable[[int], float] = lambda update: 1.0,
    lost: float = float("inf"),
) -> list[float]:
    """The loss of every update, up to where it is above `lost` or not a number: the run has diverged.

    `batch(n)` is the n-th minibatch and depends on n alone, so a run that was stopped goes on from its last checkpoint.
    An update takes `accumulate` of them; `rate` is a factor of the learning rate.
    """
    losses: list[float] = []
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    with Checkpoints(results.checkpoints, pipe, keep=1, background=False) as checkpoints:
        if checkpoints.latest:
            state = checkpoints.load(optimizer, scheduler)
            losses, results.earlier = list(state["losses"]), tuple(state["spent"])
            results.show(f"goes on from update {len(losses)}")
        shown = saved = time.monotonic()
        while len(losses) < updates:
            loss = 0.0
            for part in range(accumulate):
                inputs, target = batch(len(losses) * accumulate + part)
                loss += float(pipe.step(inputs, target, weight=1 / accumulate).loss)  # its part of the update's
            losses.append(loss)
            if not loss < lost:
                break
            if clip is not None:
                pipe.clip_grad_norm_(clip)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            now = time.monotonic()
            if now - shown > _SHOW:
                shown = now
                results.show(f"update {len(losses)} of {updates}, loss {loss:.3f}")
            if now - saved > _SAVE:
                saved = now
                checkpoints.save(optimizer, scheduler, {"losses": losses, "spent": results.spent})
    return losses


def warmed_up(updates: int, rise: int) -> Callable[[int], float]:
    """A rise of the learning rate, then a straight fall to a tenth."""
    return lambda update: min((update + 1) / rise, 1 - 0.9 * max(0, update - rise) / max(1, updates - rise))


def bounds(length: int) -> list[tuple[int, int]]:
    """The stretches over which a curve is averaged."""
    points = min(POINTS, length)
    return [(length * point // points, length * (point + 1) // points) for point in range(points)]


def middles(length: int) -> list[float]:
    """Where the points of a curve are on its axis."""
    return [(start + end - 1) / 2 for start, end in bounds(length)]


def curve(losses: Sequence[float], length: int) -> list[float | None]:
    """Means over stretches of a run; None from where it has diverged."""
    return [
        round(statistics.fmean(losses[start:end]), 4) if end <= len(losses) else None for start, end in bounds(length)
    ]


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard deviation."""
    if len(values) < 2:
        return f"{statistics.fmean(values):.{digits}f}"
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def more_than_chance(differences: Sequence[float]) -> int:
    """Of two ways, in pairs of runs: 1 if the mean is above 0, -1 if it is below, 0 if they differ too much to tell."""
    if len(differences) < 2:
        return 0
    mean, error = statistics.fmean(differences), statistics.stdev(differences) / len(differences) ** 0.5
    return (mean > SURE * error) - (mean < -SURE * error)


def parameters_of(model: torch.nn.Module) -> int:
    """How many numbers it learns."""
    return sum(parameter.numel() for parameter in model.parameters())


def numbers(name: str, words: str, kind: type[Number]) -> list[Number]:
    """Those of an option, with commas between them."""
    try:
        found = [kind(each) for each in words.split(",")]
    except ValueError as error:
        raise ValueError(f"{name} is {words!r}, but it must be numbers with commas between them") from error
    if not min(found) > 0:
        raise ValueError(f"{name} is {words!r}, but numbers must be above 0")
    return found


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _enough(value: Any) -> bool:
    return isinstance(value, str) or value > 0


def main(study: Study, arguments: Sequence[str] | None = None) -> int:
    """The command line of a study; its exit code."""
    parser = argparse.ArgumentParser(
        prog=study.command,
        description=f"{study.title}. {study.question}",
        epilog=f"example: {study.command} --quick --folder runs/quick",
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/studies"), help="of the results (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a test of a few seconds, whose figures mean nothing")
    for each in fields(study.settings):
        shown = f"{each.metadata['help']} ({getattr(study.settings, each.name)})"
        name = f"--{each.name.replace('_', '-')}"
        parser.add_argument(name, type=type(each.default), help=shown, default=None, dest=each.name)
    options = parser.parse_args(arguments)
    usual = study.quick if options.quick else study.settings
    given = {each.name: getattr(options, each.name) for each in fields(study.settings)}
    settings = type(usual)(**{**asdict(usual), **{name: value for name, value in given.items() if value is not None}})
    try:
        low = [f"--{name.replace('_', '-')} {value}" for name, value in asdict(settings).items() if not _enough(value)]
        if low:
            raise ValueError(f"{' and '.join(low)} can't be: numbers must be above 0")
        results = Results(study, settings, options.folder)
        with intra_op_threads(1):  # so that figures do not depend on the number of cores
            study.run(settings, results)
        print(results.finish())
    except KeyboardInterrupt:
        print(f"\nstopped; the same command resumes it from here: {study.command}", file=sys.stderr)
        return 130
    except (gapless.GaplessError, ValueError) as error:
        print(f"{study.command}: {error}", file=sys.stderr)
        return 2
    return 0
