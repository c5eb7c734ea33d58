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

example: python -m benchmarks matrix --devices 2,4 --keep cells.json
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from benchmarks.peer.contest import Contest
from benchmarks.peer.other_sides import ALL, TORCHGPIPE_NOTE, missing_torchgpipe
from benchmarks.peer.peer import Lineup, SideName
from benchmarks.runner.findings import BenchmarkResult, Figure, Found, cell, of_rounds, tabulated
from benchmarks.runner.parameters import Between, Rounds, Schedules, numbers
from benchmarks.runner.rounds import KeptRounds, Progress, Taken, median, quotients, silent, take_turns, within
from gapless.schedule.simulate import simulate

SIDES = ("gapless", "gapless, ranks", "torch", "torchgpipe")
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
) -> BenchmarkResult:
    """A row for each cell: the best of each side with its rounds."""
    lists = (numbers("devices", devices), numbers("microbatches", microbatches), numbers("times", times, whole=False))
    cells = {f"K = {K:g}, M = {M:g}, {ms:g} ms": (K, M, ms) for K, M, ms in sorted(itertools.product(*lists))}
    kept = KeptRounds(keep, {"schedules": schedules, "rounds": rounds}, minutes)
    wrong, skipped = dict[str, str](), missing_torchgpipe()
    sides: list[SideName] = ["gapless", "torch"] if skipped else ["gapless", "torch", "torchgpipe"]
    # Short ones first: more is there sooner.
    missing = sorted(cells.keys() - kept.facts, key=lambda name: (cells[name][2] * sum(cells[name][:2]), cells[name]))
    for number, name in enumerate(missing):
        if kept.is_time_over:
            break
        K, M, ms = cells[name]
        contest = Contest(int(K), int(M), "emulated", seconds=ms / 1000)
        at = within(progress, f"[{len(cells) - len(missing) + number + 1} of {len(cells)}] {name}")
        row = _cell(contest, schedules, sides, rounds, at)
        if row["wrong"]:
            wrong[name] = row["wrong"]
        else:
            kept.facts[name] = row
            kept.write()
    rows = [{"cell": name, **kept.facts[name]} for name in cells if name in kept.facts]
    return shown(rows, len(cells), skipped, wrong)


def _cell(contest: Contest, schedules: Sequence[str], sides: list[SideName], rounds: int, progress: Progress) -> Found:
    refused = dict[str, str]()
    with Lineup(contest, progress) as lineup:
        lineup.add_here(schedules)
        for side in sides:
            seconds = 2 * contest.seconds * contest.devices * contest.microbatches
            if side == "torchgpipe" and seconds > _LONGEST:  # its backwards are one after another on CPUs
                refused[side] = f"{TORCHGPIPE_NOTE}, and would take {seconds:.1f} s"
                continue
            names = {"torch": ALL, "torchgpipe": ("gpipe",)}.get(side, schedules)
            lineup.add_ranks(side, names, "gapless, ranks" if side == "gapless" else side)
        first = take_turns(lineup.contestants, 2, progress)
        steps = max(1, min(_MOST_STEPS, int(_SECONDS_OF_A_ROUND / min(map(min, first.values())))))
        final = {name: lineup.contestants[name] for name in _finalists(first)}
        last = take_turns(final, rounds, progress, warmup=0, steps=steps)
    refused |= lineup.refused
    best = {side: min(own, key=lambda name: median(own[name])) for side, own in _by_side(last).items()}
    bounds = {name: float(simulate(lineup.schedules[name], contest.costs).makespan) for name in last}
    quick = [f"{name} was quicker than its bound" for name in last if min(last[name]) < _LEAST * bounds[name]]
    if all(side.startswith("gapless") for side in best):
        quick = ["; ".join(["no peer ran", *(f"{name}: {why}" for name, why in refused.items())])]
    rounds_of = {name: last[name] for name in best.values()}
    first_of = {name: median(values) for name, values in first.items()}
    return {"best": best, "rounds": rounds_of, "first": first_of, "refused": refused, "wrong": "".join(quick[:1])}


def _by_side(seconds: Taken) -> dict[str, Taken]:
    found: dict[str, Taken] = {}
    for name, values in seconds.items():
        found.setdefault(name.rpartition(" ")[0], {})[name] = values
    return found


def _finalists(first: Taken) -> Iterator[str]:
    for side, own in _by_side(first).items():
        yield from sorted(own, key=lambda name: min(own[name]))[: 1 if side == "torchgpipe" else 2]


def _peers(row: Mapping[str, Any]) -> list[list[float]]:
    """The rounds of every peer's best."""
    return [row["rounds"][name] for side, name in row["best"].items() if not side.startswith("gapless")]


def won(row: Mapping[str, Any], side: str) -> bool:
    """Whether all rounds of our best on this side are quicker than every round of every peer's best."""
    return bool(max(row["rounds"][row["best"][side]]) < min(map(min, _peers(row))))


def gain(row: Mapping[str, Any], side: str) -> list[float]:
    """By how much our best is quicker than the quickest peer's best, round by round."""
    return quotients(min(_peers(row), key=median), row["rounds"][row["best"][side]])


def shown(rows: list[Found], cells: int, skipped: Mapping[str, str], wrong: Mapping[str, str]) -> BenchmarkResult:
    """A line for each cell, how many of them are won, and the gain in each."""
    lines = [{**dict.fromkeys(SIDES, "-"), "cell": row["cell"]} for row in rows]
    figures, verdict = [], []
    for side in SIDES[:2]:
        wins = sum(won(row, side) for row in rows)
        verdict += [f"{side}: {wins} of {len(rows)} cells won"] if rows else []
        figures.append(Figure(f"cells won of {len(rows)}, {side}", wins, "count", meant=f"all {cells}"))
        for row, line in zip(rows, lines, strict=True):
            line |= {
                each: f"{name.rpartition(' ')[2]} {cell(row['rounds'][name], 'ms')}"
                for each, name in row["best"].items()
            }
            meant, gains = "at least 1.4" if row["cell"] == "K = 8, M = 16, 5 ms" else "above 1", gain(row, side)
            figures.append(of_rounds(f"{row['cell']}, {side}: faster by", gains, "x", "more", meant))
            line[f"{side} gain"] = f"{median(gains):.2f}x, {'' if won(row, side) else 'not '}won"
    verdict += [f"left out: {name}: {why}" for name, why in skipped.items()]
    verdict += [f"measured wrong, run again: {name}: {why}" for name, why in wrong.items()]
    if len(rows) < cells:
        verdict.append(f"{len(rows)} of {cells} cells are there: the same command goes on")
    note = "One process and ranks: our best schedule. won: no round of ours is as slow as the quickest of any peer."
    columns = "cell | one process=gapless | ranks=gapless, ranks | torch's best=torch | torchgpipe"
    columns += " | one process=gapless gain | ranks=gapless, ranks gain"
    title = "Our best against every peer's best, emulated devices"
    table = tabulated(title, lines, columns, *verdict, note=note, in_docs=True)
    return BenchmarkResult({"rows": rows, "cells": cells, "skipped": skipped, "wrong": wrong}, figures, [table])
