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
from functools import partial
from typing import Annotated, Any

from benchmarks.gpipe import PUBLISHED
from benchmarks.gpipe.giants import OPERATIONS_PER_SECOND, amoebanet_profile, transformer_profile
from benchmarks.peer.gapless_sides import on_one_core
from benchmarks.planner.apart import late
from benchmarks.planner.subjects import emulated
from benchmarks.runner.findings import BenchmarkResult, of_rounds, tabulated
from benchmarks.runner.parameters import Between, Rounds, numbers
from benchmarks.runner.rounds import Contestant, Progress, median, silent, take_turns, timed, within
from gapless import Pipeline
from gapless.errors import ConfigError
from gapless.plan.cut.partition import balanced
from gapless.plan.profile.profile import Profile

_MODELS: dict[str, Callable[[], Profile]] = {
    "AmoebaNet-D": lambda: amoebanet_profile(18, 256, 1),
    "Transformer": lambda: transformer_profile(48, 1),
}
_SCHEDULES = {"gpipe": "gpipe", "ours": "zb-h1"}
_TITLES = {"fast": "Normalised throughput", "slow": "Normalised throughput over slow links"}


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
) -> BenchmarkResult:
    """A row for each model, table, schedule, K and M: its throughput, as table 2 has it, and table 3 for slow links."""
    rows, figures, lines = [], [], dict[str, list[dict[str, Any]]]()
    parts = [int(each) for each in numbers("microbatches", microbatches)]
    counts = [int(each) for each in numbers("devices", devices)]
    if min(counts) < 2:
        raise ConfigError("--devices has 1, but a pipeline has a link between two of them: give 2 or more")
    tables = {"fast": parts, "slow": [max(parts)]} if slow else {"fast": parts}
    for (name, make), (links, used) in itertools.product(_MODELS.items(), tables.items()):
        progress(f"counting {name}")
        profile = make()
        operations = sum(layer.forward.median for layer in profile.layers) * OPERATIONS_PER_SECOND
        hop = teraflops * 1e12 / operations / (bandwidth * 1e9) if links == "slow" else 0.0
        with contextlib.ExitStack() as stack:
            made = partial(_stepping, stack, profile, seconds=milliseconds / 1000, hop=hop)
            places = list(itertools.product(counts, used))
            contestants = {f"{by} {K} {M}": made(by, (K, M)) for by in _SCHEDULES for K, M in places}
            seconds = take_turns(contestants, rounds, within(progress, f"{name}, {links} links"))
        unit = median(next(iter(seconds.values())))  # of gpipe with the first K and M, which is 1
        for K, M in places:
            theirs = PUBLISHED["throughput"][name][links].get(f"{K} {M if links == 'fast' else 32}")
            line = {"model": name, "K": K, "M": M, "published": "-" if theirs is None else f"{theirs:g}"}
            for by in _SCHEDULES:
                taken = seconds[f"{by} {K} {M}"]
                line[by] = f"{unit / median(taken):.2f}"
                shares = [unit / each for each in taken]
                figures.append(of_rounds(f"{name}, {links} links, K = {K}, M = {M}, {by}", shares, "x", "more"))
                row = {"model": name, "links": links, "by": by, "rounds": taken}
                rows.append({**row, "devices": K, "microbatches": M})
            lines.setdefault(_TITLES[links], []).append(line)
    note = "gpipe and ours: emulated devices. The first of each model is 1, ours is normalised by gpipe's."
    more: Any = {"columns": "model | K | M | gpipe | ours | published", "note": note, "in_docs": True}
    return BenchmarkResult({"rows": rows}, figures, [tabulated(title, each, **more) for title, each in lines.items()])


def _stepping(
    stack: contextlib.ExitStack, profile: Profile, by: str, sizes: tuple[int, int], seconds: float, hop: float
) -> Contestant:
    """Emulated stages, each recomputed; `seconds` is what all forwards of a minibatch take together, and `hop` what a
    link takes for a byte, as a share of that, or 0.
    """
    devices, microbatches = sizes
    work = [layer.forward.median for layer in profile.layers]
    counts = balanced(work, devices)
    ends, part = list(itertools.accumulate(counts)), seconds / microbatches
    times = [part * sum(work[end - count : end]) / sum(work) for end, count in zip(ends, counts, strict=True)]
    model = emulated(by, [(1e3 * each,) * 3 for each in times])
    largest = max(profile.layers[end - 1].boundary for end in ends[:-1])
    world: Any = late(["cpu"] * devices, hop * largest * part, one_by_one=True) if hop else ["cpu"] * devices
    made: Any = {"devices": world, "schedule": _SCHEDULES[by], "microbatches": microbatches, "remat": "stage"}
    pipe = stack.enter_context(Pipeline(model.layers, partition=[1] * devices, loss=model.loss, **made))
    step = partial(pipe.step, *model.batch(microbatches))
    with on_one_core():
        step()
    return timed(step)
