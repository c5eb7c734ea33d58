"""Our best schedule against every peer's best, on emulated devices, for many sizes.

A cell is a number of devices, a number of microbatches, and the time of each F, I and W. In it take part

    gapless           our schedules, with threads of one process as devices
    gapless, ranks    the same with a process for each device, as torchrun starts them
    torch             every schedule of torch.distributed.pipelining, on ranks; it has no way to run in one process
    torchgpipe        where it is installed; in one process

All run twice; the best of ours and the best two of the peers then take turns for longer. A round of a short step is the
median of several steps. A cell is won if the slowest of our rounds is quicker than the quickest round of the best peer.
A cell in which anybody was quicker than the bound of its schedule was measured wrong, on a machine too busy to sleep on
time: it is told and not kept.

With --keep FILE it may be run in parts: the same command goes on with the cells that are missing.
"""

import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from benchmarks.emulated import pipeline, step
from benchmarks.peer import torchgpipe_side
from benchmarks.peer.contest import Contest
from benchmarks.peer.launcher import Launcher
from benchmarks.peer.peer import Peer, SideName, modules
from benchmarks.peer.torch_side import ALL
from benchmarks.runner.outcome import Figure, Grid, of_rounds, quotients
from benchmarks.runner.parameters import Between, Rounds, Schedules, numbers
from benchmarks.runner.report import milliseconds as in_ms
from benchmarks.runner.report import tabular
from benchmarks.runner.rounds import Contestant, Progress, median, silent, take_turns
from gapless.errors import ConfigError
from gapless.schedule.simulate import simulate

SIDES = ("gapless", "gapless, ranks", "torch", "torchgpipe")
_NAMES: dict[str, Sequence[str]] = {"torch": ALL, "torchgpipe": ("gpipe",)}
_LEAST = 0.98  # of its bound: whatever is quicker was measured wrong
_SECONDS_OF_A_ROUND, _MOST_STEPS = 1.5, 9
_LONGEST = 2.0  # seconds of a step, beyond which torchgpipe is left out of a cell


def run(
    *,
    devices: Annotated[tuple[str, ...], "numbers of devices"] = ("2", "4", "8", "16"),
    microbatches: Annotated[tuple[str, ...], "numbers of microbatches"] = ("8", "16", "32"),
    times: Annotated[tuple[str, ...], "times of each F, I and W of a device, in milliseconds"] = ("1", "5", "20"),
    schedules: Schedules = ("1f1b", "zb-h1", "zb-v", "auto"),
    rounds: Rounds = 5,
    keep: Annotated[Path | None, "file that keeps the cells; the same command goes on from it"] = None,
    minutes: Annotated[float, "with --keep: start no cell after so many minutes", Between(0.1, 1000)] = 1000.0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """A row for each cell: the best of each side with its rounds."""
    cells = list(
        itertools.product(
            numbers("devices", devices), numbers("microbatches", microbatches), numbers("times", times, whole=False)
        )
    )
    cells.sort(key=lambda cell: (cell[2] * (cell[0] + cell[1]), cell))  # short ones first: more is there sooner
    kept = _Cells(keep, {"schedules": list(schedules), "rounds": rounds})
    until, wrong = time.monotonic() + 60 * minutes, dict[str, str]()
    skipped = {"torchgpipe": why} if (why := torchgpipe_side.missing()) else {}
    sides: list[SideName] = ["gapless", "torch"] if skipped else ["gapless", "torch", "torchgpipe"]
    with contextlib.ExitStack() as stack:
        launcher: Launcher | None = None
        for number, (count, parts, each) in enumerate(cells):
            name = f"K = {count:g}, M = {parts:g}, {each:g} ms"
            if name in kept.rows or (keep is not None and time.monotonic() > until):
                continue
            if launcher is None:
                launcher = Launcher(*modules(*sides))
                stack.callback(launcher.close)
            at = f"[{number + 1} of {len(cells)}] {name}"
            contest = Contest(int(count), int(parts), "emulated", seconds=each / 1000)
            told = partial(_told, progress, at)
            row = _cell(contest, schedules, sides, rounds, launcher, told)
            if row["wrong"]:
                wrong[name] = row["wrong"]
            else:
                kept.add(name, row)
    progress("")
    names = [f"K = {count:g}, M = {parts:g}, {each:g} ms" for count, parts, each in sorted(cells)]
    return {
        "rows": [{"cell": name, **kept.rows[name]} for name in names if name in kept.rows],
        "cells": len(cells),
        "skipped": skipped,
        "wrong": wrong,
    }


def _told(progress: Progress, at: str, line: str) -> None:
    progress(f"{at}: {line}" if line else at)


class _Cells:
    """Those that are there, in a file if there is one."""

    def __init__(self, file: Path | None, settings: dict[str, Any]) -> None:
        self._file, self._settings, self.rows = file, settings, dict[str, dict[str, Any]]()
        if file is None or not file.exists() or not file.stat().st_size:
            return
        try:
            found = json.loads(file.read_text("utf-8"))
            there, self.rows = found["settings"], found["rows"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{file} does not keep cells of this benchmark: give another file") from None
        if there != settings:
            raise ConfigError(f"{file} keeps cells with other schedules or rounds: give another file, or delete it")

    def add(self, name: str, row: dict[str, Any]) -> None:
        self.rows[name] = row
        if self._file is not None:
            aside = self._file.with_name(f"{self._file.name}.part")
            aside.write_text(json.dumps({"settings": self._settings, "rows": self.rows}), "utf-8")
            os.replace(aside, self._file)


def _cell(
    contest: Contest,
    schedules: Sequence[str],
    sides: Sequence[SideName],
    rounds: int,
    launcher: Launcher,
    progress: Progress,
) -> dict[str, Any]:
    refused: dict[str, str] = {}
    peers: dict[str, Peer] = {}
    with contextlib.ExitStack() as stack:
        contestants: dict[str, Contestant] = {}
        bounds: dict[str, float] = {}
        for name in schedules:
            pipe = stack.enter_context(pipeline(contest, name))
            contestants[f"gapless {name}"] = step(contest, pipe)
            bounds[f"gapless {name}"] = float(simulate(pipe.schedule, contest.costs).makespan)
        for side in sides:
            if side == "torchgpipe" and (why := _too_long(contest)):
                refused[side] = why
                continue
            progress(f"starting {side}")
            peer = stack.enter_context(Peer(contest, _NAMES.get(side, schedules), side, launcher=launcher))
            shown = "gapless, ranks" if side == "gapless" else side
            peers[shown] = peer
            contestants |= {f"{shown} {name}": partial(peer.step, name) for name in peer.schedules}
            for name, schedule in peer.schedules.items():
                bounds[f"{shown} {name}"] = float(simulate(schedule, contest.costs).makespan)
        first = take_turns(contestants, 2, progress)
        shortest = min(min(values) for values in first.values())
        steps = max(1, min(_MOST_STEPS, int(_SECONDS_OF_A_ROUND / shortest)))
        final = {name: partial(_median_step, contestants[name], steps) for name in _finalists(first)}
        last = take_turns(final, rounds, progress, warmup=0)
    refused |= {f"{side} {name}": why for side, peer in peers.items() for name, why in peer.refused.items()}
    best = {side: min(own, key=lambda name: median(own[name])) for side, own in _by_side(last).items()}
    return {
        "best": best,
        "rounds": {name: last[name] for name in best.values()},
        "first": {name: median(values) for name, values in first.items()},
        "refused": refused,
        "wrong": _wrong(last, best, refused, bounds),
    }


def _median_step(contestant: Contestant, steps: int) -> float:
    """Of a round of several steps: one that something else on this machine has disturbed does not count."""
    return median([contestant() for _ in range(steps)])


def _wrong(
    seconds: Mapping[str, list[float]], sides: Iterable[str], refused: Mapping[str, str], bounds: Mapping[str, float]
) -> str:
    """Why the cell does not count, if it does not."""
    if all(side.startswith("gapless") for side in sides):
        return "; ".join(["no peer ran", *(f"{name}: {why}" for name, why in refused.items())])
    quick = [name for name, values in seconds.items() if min(values) < _LEAST * bounds[name]]
    return f"{quick[0]} was quicker than its bound" if quick else ""


def _too_long(contest: Contest) -> str:
    """Of torchgpipe, whose backwards are one after another on CPUs."""
    seconds = 2 * contest.seconds * contest.devices * contest.microbatches
    return f"{torchgpipe_side.NOTE}, and would take {seconds:.1f} s" if seconds > _LONGEST else ""


def _by_side(seconds: Mapping[str, list[float]]) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {}
    for name, values in seconds.items():
        found.setdefault(name.rpartition(" ")[0], {})[name] = values
    return found


def _finalists(first: Mapping[str, list[float]]) -> Iterator[str]:
    for side, own in _by_side(first).items():
        quickest = sorted(own, key=lambda name: min(own[name]))
        yield from quickest[: 1 if side == "torchgpipe" else 2]


def won(row: Mapping[str, Any], side: str) -> bool:
    """Whether all rounds of our best on this side are quicker than every round of every peer's best."""
    peers = [row["rounds"][name] for other, name in row["best"].items() if not other.startswith("gapless")]
    return bool(max(row["rounds"][row["best"][side]]) < min(min(rounds) for rounds in peers))


def gain(row: Mapping[str, Any], side: str) -> list[float]:
    """By how much our best is quicker than the quickest peer's best, round by round."""
    peers = [row["rounds"][name] for other, name in row["best"].items() if not other.startswith("gapless")]
    return quotients(min(peers, key=median), row["rounds"][row["best"][side]])


def figures(found: Mapping[str, Any]) -> list[Figure]:
    """How many cells are won, and the gain in each."""
    shown = []
    for side in SIDES[:2]:
        rows = found["rows"]
        wins = sum(won(row, side) for row in rows)
        shown.append(Figure(f"cells won of {len(rows)}, {side}", wins, "count", meant=f"all {found['cells']}"))
        for row in rows:
            meant = "at least 1.4" if row["cell"] == "K = 8, M = 16, 5 ms" else "above 1"
            shown.append(of_rounds(f"{row['cell']}, {side}: faster by", gain(row, side), "x", "more", meant))
    return shown


def tables(found: Mapping[str, Any]) -> list[Grid]:
    """A line for each cell."""
    note = "One process and ranks: our best schedule. won: no round of ours is as slow as the quickest of any peer."
    return [Grid("Our best against every peer's best, emulated devices", _HEADINGS, _cells(found), note)]


_HEADINGS = ("cell", "one process", "ranks", "torch's best", "torchgpipe", "one process", "ranks")


def _cells(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for row in found["rows"]:
        best = [_best(row, side) for side in SIDES]
        verdicts = [f"{median(gain(row, side)):.2f}x{', won' if won(row, side) else ', not won'}" for side in SIDES[:2]]
        rows.append((row["cell"], *best, *verdicts))
    return rows


def _best(row: Mapping[str, Any], side: str) -> str:
    if side not in row["best"]:
        return "-"
    name = row["best"][side]
    return f"{name.rpartition(' ')[2]} {in_ms(median(row['rounds'][name]))}"


def report(found: dict[str, Any]) -> str:
    """A line for each cell, and how many of them are won."""
    rows = found["rows"]
    verdict = [f"{side}: {sum(won(row, side) for row in rows)} of {len(rows)} cells won" for side in SIDES[:2] if rows]
    verdict += [f"left out: {name}: {why}" for name, why in found["skipped"].items()]
    verdict += [f"measured wrong, run again: {cell}: {why}" for cell, why in found["wrong"].items()]
    if len(rows) < found["cells"]:
        verdict.append(f"{len(rows)} of {found['cells']} cells are there: the same command goes on")
    title = (
        f"emulated devices, medians of {found['rounds']}; a peer that runs on ranks has no way to run in one process"
    )
    return tabular(title, _HEADINGS, _cells(found), "", *verdict)
