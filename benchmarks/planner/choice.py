"""Is the choice right? On emulated devices and links every schedule that fits is run, and the planner's pick is
compared with the quickest. And is the planned partition the best? Unbalanced models on two devices: every cut there is,
measured.

First all run twice; then what the planner picks and the quickest of the first part take turns for longer.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from benchmarks.planner import subjects
from benchmarks.planner.apart import late
from benchmarks.planner.subjects import Subject, emulated
from benchmarks.runner.rounds import Progress, finals, median, ratio
from benchmarks.runner.told import Table, cell, tabulated
from gapless.errors import PlanError
from gapless.plan.cut.partition import equal_counts
from gapless.plan.plan import Plan
from gapless.plan.profile.machine import Device, Mesh
from gapless.plan.profile.measure import hop
from gapless.plan.profile.profile import Link, Profile
from gapless.plan.search.choices import RECIPES
from gapless.plan.search.search import search
from gapless.plan.search.search_options import SearchOptions

NEAR = 0.03  # how much slower than the best the planned one may be
_MIB = 2**20
_LAYERS = 4  # per device
_FINALISTS = 4

Milliseconds = tuple[float, float, float]  # of F, I and W

COSTS: dict[str, Callable[[int], list[Milliseconds]]] = {
    "even": lambda count: [(1.5, 1.5, 1.5)] * count,
    "light W": lambda count: [(1.5, 2.0, 0.75)] * count,
    "heavy W": lambda count: [(1.0, 1.0, 2.5)] * count,
    "uneven": lambda count: [(1.0 + n % 3, 1.5 + n % 3, 1.0 + n % 2) for n in range(count)],
}


@dataclass(frozen=True)
class Place:
    """`costs` of a layer, `latency` of a link in milliseconds, the MiB that a device has (None: no limit), where the
    activation of a layer is 1 MiB.
    """

    costs: str
    devices: int
    microbatches: int
    latency: float = 0.0
    limit: int | None = None


GRID = (
    Place("even", 2, 4),
    Place("even", 2, 8, latency=3),
    Place("even", 4, 8),
    Place("even", 4, 8, latency=1),
    Place("even", 4, 8, latency=5),
    Place("even", 4, 8, limit=20),
    Place("even", 4, 8, limit=12, latency=3),
    Place("light W", 2, 4, limit=9),
    Place("light W", 4, 8),
    Place("light W", 4, 12, latency=3),
    Place("heavy W", 4, 4),
    Place("heavy W", 4, 8, latency=3, limit=20),
    Place("uneven", 2, 8),
    Place("uneven", 3, 6, limit=16),
    Place("uneven", 4, 8, latency=3),
)


def run(*, rounds: int, seconds: float, quick: bool, progress: Progress) -> dict[str, Any]:
    """A row for each place of the grid; `quick` is one small place."""
    profiles: dict[tuple[str, int], Profile] = {}
    rows = []
    for place in (Place("even", 2, 2, latency=1),) if quick else GRID:
        subject = emulated(place.costs, COSTS[place.costs](_LAYERS * place.devices))
        if (place.costs, place.devices) not in profiles:
            progress(f"measuring {place.costs}")
            profiles[place.costs, place.devices] = _sized(subject.profile("cpu", place.devices, seconds))
        rows.append(_row(place, subject, _plans(place, profiles[place.costs, place.devices]), rounds, progress))
    return {"rows": rows}


def _sized(profile: Profile) -> Profile:
    """With sizes of real layers: an emulated one holds next to nothing."""
    none = dict.fromkeys(("parameters", "gradients", "optimizer_state", "boundary", "overlap", "workspace"), 0)
    real: dict[str, Any] = {**none, "activation": _MIB, "kept_for_weight_grad": _MIB}
    return replace(profile, layers=tuple(replace(layer, **real) for layer in profile.layers), input=0)


def _plans(place: Place, profile: Profile) -> list[Plan]:
    """The best of each recipe, the best of all first."""
    link = Link("emulated", None, hop().latency + place.latency / 1e3)
    devices = [Device(None if place.limit is None else place.limit * _MIB)] * place.devices
    found = []
    for recipe in (*RECIPES, "auto"):  # each alone: what can't be the best of all is left out of a search
        wanted = SearchOptions(place.microbatches, [recipe], mesh=Mesh(1, place.devices), slack=0.0, time_limit=None)
        with contextlib.suppress(PlanError):
            found.append(search(replace(profile, links=(link,)), devices, wanted, place.microbatches).best)
    return sorted(found, key=lambda plan: plan.step_seconds)


def _row(place: Place, subject: Subject, plans: Sequence[Plan], rounds: int, progress: Progress) -> dict[str, Any]:
    picked = plans[0].recipe
    with contextlib.ExitStack() as stack:
        world = partial(late, ["cpu"] * place.devices, place.latency / 1e3)
        contestants = {plan.recipe: subject.contestant(stack, plan, world()) for plan in plans}
        first, seconds = finals(contestants, [picked], _FINALISTS, rounds, progress)
    quickest = min(seconds, key=lambda recipe: median(seconds[recipe]))
    return {
        **asdict(place),
        "picked": picked,
        "quickest": quickest,
        "seconds": {recipe: median(values) for recipe, values in (first | seconds).items()},
        "predicted": {plan.recipe: plan.step_seconds - plan.breakdown.update for plan in plans},
        "slower": ratio(seconds[picked], seconds[quickest]) - 1,
        "rounds": seconds,
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The pick and the quickest of each place, and how often they are as good as the same."""
    right = sum(row["slower"] <= NEAR for row in rows)
    shown = [
        {
            **row,
            "latency": f"{row['latency']:g} ms",
            "limit": "-" if row["limit"] is None else f"{row['limit']} MiB",
            "schedules": len(row["seconds"]),
            **{f"{who} step": row["seconds"][row[who]] for who in ("picked", "quickest")},
        }
        for row in rows
    ]
    title = f"choice\nmeant: the pick within {NEAR:.0%} of the quickest of all schedules that fit"
    columns = "costs | latency | K=devices | M=microbatches | limit | schedules | picked | step=picked step:ms"
    columns += " | quickest | step=quickest step:ms | =slower:+%"
    return tabulated(title, shown, columns, f"within {NEAR:.0%}: {right} of {len(rows)}")


# -- cuts --------------------------------------------------------------------------------------------------------------

_DEVICES, _MICROBATCHES = 2, 4

_UNBALANCED: Sequence[Callable[[], Subject]] = (
    lambda: subjects.small_gpt(width=64, depth=5, vocab=6000, length=32),
    lambda: subjects.small_resnet(101, side=128, samples=2),
    subjects.small_unet,
    subjects.small_transformer,
    subjects.random_layers,
)


def cuts(*, rounds: int, seconds: float, quick: bool, progress: Progress) -> dict[str, Any]:
    """A row for each model; `quick` is one small model."""
    rows = []
    for make in [lambda: subjects.random_layers(4, samples=4)] if quick else _UNBALANCED:
        subject = make()
        progress(f"measuring {subject.name}")
        rows.append(_cut_row(subject, subject.profile("cpu", _DEVICES, seconds), rounds, progress))
    return {"rows": rows}


def _cut_row(subject: Subject, profile: Profile, rounds: int, progress: Progress) -> dict[str, Any]:
    count = len(subject.layers)
    # As `make_plan` would cut it.
    wanted = SearchOptions(_MICROBATCHES, ["1f1b"], mesh=Mesh(1, _DEVICES), time_limit=None)
    minibatch = _MICROBATCHES * profile.samples
    chosen = _shown(search(profile, _DEVICES, wanted, minibatch).best.partition)
    equal = _shown(equal_counts(count, _DEVICES))
    with contextlib.ExitStack() as stack:
        made = partial(subjects.planned, profile, _DEVICES, "1f1b", _MICROBATCHES)
        all_cuts = [(first, count - first) for first in range(1, count)]
        contestants = {_shown(cut): subject.contestant(stack, made(partition=cut)) for cut in all_cuts}
        _, seconds = finals(contestants, [chosen, equal], 3, rounds, progress)
    best = min(seconds, key=lambda cut: median(seconds[cut]))
    return {
        "model": subject.name,
        "layers": count,
        "planned": chosen,
        "equal": equal,
        "best": best,
        "seconds": {cut: median(values) for cut, values in seconds.items()},
        "faster_than_equal": ratio(seconds[equal], seconds[chosen]),
        "slower_than_best": ratio(seconds[chosen], seconds[best]) - 1,
        "rounds": seconds,
    }


def _shown(cut: Sequence[int]) -> str:
    return "|".join(map(str, cut))


def cuts_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The planned cut of each model beside equal counts and the best cut."""
    shown = [
        row | {key: f"{row[key]} {cell(row['seconds'][row[key]], 'ms')}" for key in ("equal", "planned", "best")}
        for row in rows
    ]
    title = (
        f"cuts\n{_DEVICES} devices, 1f1b, {_MICROBATCHES} microbatches; meant: faster than equal counts, and within "
        f"{NEAR:.0%} of the best cut"
    )
    columns = "model | layers | equal | planned | best of all=best | faster than equal=faster_than_equal:x"
    return tabulated(title, shown, f"{columns} | to the best=slower_than_best:+%")
