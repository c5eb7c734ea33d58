"""GPipe's second and third table: throughput for K devices and M microbatches, over fast and over slow links.

The models are the paper's, AmoebaNet-D (18, 256) and a Transformer of 48 layers, cut into K stages of about equal work.
Devices are emulated: what a layer takes is predicted from its operations, counted without data, and every action lasts
its part of the time that a minibatch takes in all. So this shows what the schedule, the cut and our program leave of K
devices, and not how well a device computes small microbatches, which the published numbers have in them too.

    gpipe   the paper's schedule, with every stage recomputed
    ours    zb-h1, with every stage recomputed too

Throughput is normalised: that of gpipe with K = 2 and M = 1 is 1 (slow links: K = 2 and M = 32). A slow link carries
one message after another, at --bandwidth; devices compute at --teraflops.

example: python -m benchmarks throughput --devices 2,4 --no-slow
"""

import contextlib
import itertools
from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch import nn

from benchmarks.gpipe import published
from benchmarks.gpipe.giants import OPERATIONS_PER_SECOND, amoebanet_profile, transformer_profile
from benchmarks.peer.gapless_sides import on_one_core
from benchmarks.planner.apart import late
from benchmarks.runner.parameters import Between, Rounds, numbers
from benchmarks.runner.rounds import Contestant, Progress, median, silent, take_turns, timed, within
from benchmarks.runner.told import Found, Told, of_rounds, tabulated
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
) -> Found:
    """A row for each model, table, schedule, K and M, with its rounds."""
    rows = []
    parts = [int(each) for each in numbers("microbatches", microbatches)]
    counts = [int(each) for each in numbers("devices", devices)]
    if min(counts) < 2:
        raise ConfigError("--devices has 1, but a pipeline has a link between two of them: give 2 or more")
    for name, make in _MODELS.items():
        progress(f"counting {name}")
        profile = make()
        for links, used in (("fast", parts), ("slow", [max(parts)]))[: 2 if slow else 1]:
            with contextlib.ExitStack() as stack:
                contestants: dict[str, Contestant] = {}
                for by, K, M in itertools.product(_SCHEDULES, counts, used):
                    hop = _hop(profile, K, bandwidth, teraflops) if links == "slow" else 0.0
                    pipe = stack.enter_context(_pipeline(profile, _SCHEDULES[by], K, M, milliseconds / 1000, hop))
                    contestants[f"{by} {K} {M}"] = _stepping(pipe, M)
                seconds = take_turns(contestants, rounds, within(progress, f"{name}, {links} links"))
            for key, values in seconds.items():
                by, *sizes = key.split()
                row = {"model": name, "links": links, "by": by, "rounds": values}
                rows.append(row | dict(zip(("devices", "microbatches"), map(int, sizes), strict=True)))
    progress("")
    return {"rows": rows}


def _cut(profile: Profile, devices: int) -> tuple[list[float], list[int]]:
    """The share of the work of each stage, and where stages end."""
    work = [layer.forward.median for layer in profile.layers]
    counts = balanced(work, devices)
    ends = list(itertools.accumulate(counts))
    shares = [sum(work[end - count : end]) / sum(work) for end, count in zip(ends, counts, strict=True)]
    return shares, ends


def _hop(profile: Profile, devices: int, bandwidth: float, teraflops: float) -> float:
    """What the largest message between stages takes, as a share of the forward of the whole model."""
    _, ends = _cut(profile, devices)
    largest = max(profile.layers[end - 1].boundary for end in ends[:-1])
    operations = sum(layer.forward.median for layer in profile.layers) * OPERATIONS_PER_SECOND
    return (largest / (bandwidth * 1e9)) / (operations / (teraflops * 1e12))


def _pipeline(profile: Profile, recipe: str, devices: int, microbatches: int, seconds: float, hop: float) -> Pipeline:
    """Emulated stages, each recomputed; `seconds` is what all forwards of a minibatch take together."""
    each = [share * seconds / microbatches for share in _cut(profile, devices)[0]]
    stages = [Emulated(forward=time, input_grad=time, weight_grad=time) for time in each]
    world = late(["cpu"] * devices, hop * seconds / microbatches, one_by_one=True)
    sizes: Any = {"microbatches": microbatches, "partition": [1] * devices, "remat": "stage", "loss": _first}
    return Pipeline(nn.Sequential(*stages), devices=world if hop else ["cpu"] * devices, schedule=recipe, **sizes)


def _stepping(pipe: Pipeline, microbatches: int) -> Contestant:
    inputs = torch.linspace(-1.0, 1.0, microbatches).view(microbatches, 1).requires_grad_()
    target = torch.zeros(microbatches, 1)
    with on_one_core():
        pipe.step(inputs, target)
    return timed(lambda: pipe.step(inputs, target))


def _first(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return outputs.sum()


def told(found: Found) -> Told:
    """The throughput of every row, as table 2 has it, and table 3 where it was measured."""
    grids: dict[tuple[str, str], dict[tuple[int, int], dict[str, Any]]] = {}
    figures = []
    for row in found["rows"]:  # those of gpipe come first, and the first of them is 1
        model, links, by, K, M = (row[key] for key in ("model", "links", "by", "devices", "microbatches"))
        grid = grids.setdefault((links, model), {})
        line = grid.setdefault((K, M), {"model": model, "K": K, "M": M, "published": "-"})
        line[by] = row["rounds"]
        theirs = published.THROUGHPUT[model].get((K, M)) if links == "fast" else published.SLOW_LINKS[model].get(K)
        line |= {} if theirs is None else {"published": f"{theirs:g}"}
        unit = median(grid[min(grid)]["gpipe"])
        name = f"{model}, {links} links, K = {K}, M = {M}, {by}"
        figures.append(of_rounds(name, [unit / each for each in row["rounds"]], "x", "more"))
        line[f"{by} throughput"] = f"{unit / median(row['rounds']):.2f}"
    note = "gpipe and ours: emulated devices. The first of each model is 1, ours is normalised by gpipe's."
    columns = "model | K | M | gpipe=gpipe throughput | ours=ours throughput | published"
    titles = {"fast": "Normalised throughput", "slow": "Normalised throughput over slow links"}
    rows = {
        links: [line for key, grid in grids.items() if key[0] == links for line in grid.values()] for links in titles
    }
    tables = [tabulated(titles[each], rows[each], columns, note=note, in_docs=True) for each in titles if rows[each]]
    return Told(figures, tables)
