"""GPipe's second and third table: throughput for K devices and M microbatches, over fast and over slow links.

The models are the paper's, AmoebaNet-D (18, 256) and a Transformer of 48 layers, cut into K stages of about equal work.
Devices are emulated: what a layer takes is predicted from its operations, counted without data, and every action lasts
its part of the time that a minibatch takes in all. So this shows what the schedule, the cut and our program leave of K
devices, and not how well a device computes small microbatches, which the published numbers have in them too.

    gpipe   the paper's schedule, with every stage recomputed
    ours    zb-h1, with every stage recomputed too

Throughput is normalised: that of gpipe with K = 2 and M = 1 is 1 (slow links: K = 2 and M = 32). A slow link carries
one message after another, at --bandwidth; devices compute at --teraflops.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Annotated, Any

import torch
from torch import nn

from benchmarks.gpipe import published
from benchmarks.gpipe.giants import amoebanet_profile, transformer_profile
from benchmarks.gpipe.operation_counts import OPERATIONS_PER_SECOND
from benchmarks.peer.one_core import on_one_core
from benchmarks.planner.late_link import late
from benchmarks.runner.outcome import Figure, Grid, of_rounds
from benchmarks.runner.parameters import Between, Rounds, numbers
from benchmarks.runner.report import tabular
from benchmarks.runner.rounds import Contestant, Progress, median, silent, take_turns, timed
from gapless.errors import ConfigError
from gapless.pipeline.pipeline import Pipeline
from gapless.plan.cut.partition import balanced
from gapless.plan.profile.profile import Profile
from gapless.zoo.emulated import Emulated

_MODELS: dict[str, Callable[[], Profile]] = {
    "AmoebaNet-D": lambda: amoebanet_profile(18, 256, 1),
    "Transformer": lambda: transformer_profile(48, 1),
}
_SCHEDULES = {"gpipe": "gpipe", "ours": "zb-h1"}


def run(
    *,
    milliseconds: Annotated[float, "forwards of a minibatch in all, of all devices", Between(1, 60_000)] = 400.0,
    devices: Annotated[tuple[str, ...], "numbers of devices"] = ("2", "4", "8"),
    microbatches: Annotated[tuple[str, ...], "numbers of microbatches"] = ("1", "4", "32"),
    bandwidth: Annotated[float, "of slow links, in gigabytes a second", Between(0.001, 10_000)] = 10.0,
    teraflops: Annotated[float, "of a device, for slow links", Between(0.001, 100_000)] = 2.0,
    slow: Annotated[bool, "leave out slow links"] = True,
    rounds: Rounds = 3,
    progress: Progress = silent,
) -> dict[str, Any]:
    """A row for each model, table, schedule, K and M, with its rounds."""
    rows = []
    parts = [int(each) for each in numbers("microbatches", microbatches)]
    counts = [int(each) for each in numbers("devices", devices)]
    if min(counts) < 2:
        raise ConfigError("--devices has 1, but a pipeline has a link between two of them: give 2 or more")
    for name, make in _MODELS.items():
        progress(f"counting {name}")
        profile = make()
        for table in ("fast", "slow") if slow else ("fast",):
            used = parts if table == "fast" else [max(parts)]
            with contextlib.ExitStack() as stack:
                contestants: dict[str, Contestant] = {}
                for by, recipe in _SCHEDULES.items():
                    for count in counts:
                        for part in used:
                            hop = _hop(profile, count, bandwidth, teraflops) if table == "slow" else 0.0
                            made = partial(_contestant, profile, recipe, count, part, milliseconds / 1000, hop)
                            contestants[f"{by} {count} {part}"] = made(stack)
                told = partial(_told, progress, f"{name}, {table} links")
                seconds = take_turns(contestants, rounds, told)
            for key, values in seconds.items():
                by, count_, part_ = key.split()
                row = {"model": name, "links": table, "by": by, "devices": int(count_), "microbatches": int(part_)}
                rows.append({**row, "rounds": values})
    progress("")
    return {"rows": rows}


def _told(progress: Progress, at: str, line: str) -> None:
    progress(f"{at}: {line}" if line else at)


def _cut(profile: Profile, devices: int) -> tuple[list[float], list[int]]:
    """The share of the work of each stage, and where stages end."""
    work = [layer.forward.median for layer in profile.layers]
    counts = balanced(work, devices)
    ends = list(accumulate(counts))
    shares = [sum(work[end - count : end]) / sum(work) for end, count in zip(ends, counts, strict=True)]
    return shares, ends


def _hop(profile: Profile, devices: int, bandwidth: float, teraflops: float) -> float:
    """What the largest message between stages takes, as a share of the forward of the whole model."""
    _, ends = _cut(profile, devices)
    largest = max(profile.layers[end - 1].boundary for end in ends[:-1])
    operations = sum(layer.forward.median for layer in profile.layers) * OPERATIONS_PER_SECOND
    return (largest / (bandwidth * 1e9)) / (operations / (teraflops * 1e12))


def _contestant(
    profile: Profile,
    recipe: str,
    devices: int,
    microbatches: int,
    seconds: float,
    hop: float,
    stack: contextlib.ExitStack,
) -> Contestant:
    """Steps of emulated stages, each recomputed; `seconds` is what all forwards of a minibatch take together."""
    shares, _ = _cut(profile, devices)
    each = [share * seconds / microbatches for share in shares]
    stages = [Emulated(forward=time, input_grad=time, weight_grad=time) for time in each]
    world = late(["cpu"] * devices, hop * seconds / microbatches, one_by_one=True)
    pipe = stack.enter_context(
        Pipeline(
            nn.Sequential(*stages),
            devices=world if hop else ["cpu"] * devices,
            schedule=recipe,
            microbatches=microbatches,
            partition=[1] * devices,
            remat="stage",
            loss=_first,
        )
    )
    inputs = torch.linspace(-1.0, 1.0, microbatches).view(microbatches, 1).requires_grad_()
    target = torch.zeros(microbatches, 1)
    with on_one_core():
        pipe.step(inputs, target)
    return timed(lambda: pipe.step(inputs, target))


def _first(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return outputs.sum()


def _unit(rows: Sequence[Mapping[str, Any]], model: str, links: str) -> float:
    """What counts as 1."""
    own = [row for row in rows if (row["model"], row["links"], row["by"]) == (model, links, "gpipe")]
    first = min(own, key=lambda row: (row["devices"], row["microbatches"]))
    return median(first["rounds"])


def figures(found: Mapping[str, Any]) -> list[Figure]:
    """Of every row its normalised throughput."""
    shown = []
    for row in found["rows"]:
        unit = _unit(found["rows"], row["model"], row["links"])
        name = f"{row['model']}, {row['links']} links, K = {row['devices']}, M = {row['microbatches']}, {row['by']}"
        shown.append(of_rounds(name, [unit / each for each in row["rounds"]], "x", "more"))
    return shown


def tables(found: Mapping[str, Any]) -> list[Grid]:
    """Table 2, and table 3 where it was measured."""
    note = "gpipe and ours: emulated devices. The first of each model is 1, ours is normalised by gpipe's."
    titles = {"fast": "Normalised throughput", "slow": "Normalised throughput over slow links"}
    return [
        Grid(title, _HEADINGS, _cells(found, links), note)
        for links, title in titles.items()
        if any(row["links"] == links for row in found["rows"])
    ]


_HEADINGS = ("model", "K", "M", "gpipe", "ours", "published")


def _cells(found: Mapping[str, Any], links: str) -> list[tuple[str, ...]]:
    rows, shown = found["rows"], []
    for row in rows:
        if row["links"] != links or row["by"] != "gpipe":
            continue
        model, count, part = row["model"], row["devices"], row["microbatches"]
        ours = next(
            each
            for each in rows
            if (each["model"], each["links"], each["by"], each["devices"], each["microbatches"])
            == (model, links, "ours", count, part)
        )
        unit = _unit(rows, model, links)
        theirs = (
            published.THROUGHPUT[model].get((count, part))
            if links == "fast"
            else published.SLOW_LINKS[model].get(count)
        )
        times = [f"{unit / median(each['rounds']):.2f}" for each in (row, ours)]
        shown.append((model, str(count), str(part), *times, "-" if theirs is None else f"{theirs:g}"))
    return shown


def report(found: dict[str, Any]) -> str:
    """A table for each kind of link."""
    return "\n\n".join(tabular(grid.title, grid.headings, grid.rows, "", grid.note) for grid in tables(found))
