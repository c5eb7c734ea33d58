"""Is the planner right? In its predictions, its cuts, its choices, and in what it says will fit.

prediction   a step and its memory, as planned and as measured
cuts         the planned partition against equal counts of layers, and against every cut there is
choice       the planned schedule against every other one that fits
fit          limits around what is predicted, on a GPU

example: python -m benchmarks plan --parts cuts,choice
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any

from benchmarks.planner import fit as fit_
from benchmarks.planner import prediction, subjects
from benchmarks.planner.apart import late
from benchmarks.planner.subjects import Subject, emulated
from benchmarks.runner.findings import BenchmarkResult, Figure, Found, Table, cell, tabulated
from benchmarks.runner.parameters import Between, Rounds, one_of
from benchmarks.runner.rounds import Progress, median, ratio, silent, take_turns
from gapless.errors import PlanError
from gapless.plan.cut.partition import equal_counts
from gapless.plan.plan import Plan
from gapless.plan.profile.machine import Device, Mesh
from gapless.plan.profile.measure import hop
from gapless.plan.profile.profile import Link, Profile
from gapless.plan.search.choices import RECIPES
from gapless.plan.search.search import search
from gapless.plan.search.search_options import SearchOptions
from gapless.run.world import World

# -- choice: on emulated devices and links, first every schedule that fits, then the pick and the quickest for longer --

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


def choice(*, rounds: int, seconds: float, quick: bool, progress: Progress) -> tuple[list[Found], Table]:
    """A row for each place of the grid, and how often the pick is as good; `quick` is one small place."""
    profiles: dict[tuple[str, int], Profile] = {}
    rows = []
    for place in (Place("even", 2, 2, latency=1),) if quick else GRID:
        subject = emulated(place.costs, COSTS[place.costs](_LAYERS * place.devices))
        if (kind := (place.costs, place.devices)) not in profiles:
            progress(f"measuring {place.costs}")
            profiles[kind] = _sized(subject.profile("cpu", place.devices, seconds))
        plans = _plans(place, profiles[kind])
        made = {plan.recipe: (plan, late(["cpu"] * place.devices, place.latency / 1e3)) for plan in plans}
        picked = plans[0].recipe
        times, quickest = _quickest(subject, made, [picked], _FINALISTS, rounds, progress)
        predicted = {plan.recipe: plan.step_seconds - plan.breakdown.update for plan in plans}
        slower = ratio(times["rounds"][picked], times["rounds"][quickest]) - 1
        row = {"picked": picked, "quickest": quickest, "predicted": predicted, "slower": slower, **times}
        row |= {
            "schedules": len(plans),
            "of_picked": times["seconds"][picked],
            "of_quickest": times["seconds"][quickest],
        }
        rows.append({**asdict(place), **row})
    right = sum(row["slower"] <= NEAR for row in rows)
    title = f"choice\nmeant: the pick within {NEAR:.0%} of the quickest of all schedules that fit"
    columns = "costs | latency, ms=latency | K=devices | M=microbatches | limit, MiB=limit | schedules | picked"
    columns += " | step=of_picked:ms | quickest | step=of_quickest:ms | =slower:+%"
    return rows, tabulated(title, rows, columns, f"within {NEAR:.0%}: {right} of {len(rows)}")


def _quickest(
    subject: Subject, plans: Mapping[str, tuple[Plan, World | None]], seeded: Sequence[str], most: int, rounds: int,
    progress: Progress,
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """All run twice; then the seeded ones and the quickest few run for longer. The rounds of these, the seconds of all,
    and which is the quickest.
    """
    with contextlib.ExitStack() as stack:
        contestants = {name: subject.contestant(stack, *made) for name, made in plans.items()}
        first = take_turns(contestants, 2, progress)
        last = dict.fromkeys([*seeded, *sorted(first, key=lambda name: min(first[name]))[:most]])
        taken = take_turns({name: contestants[name] for name in last}, rounds, progress, warmup=0)
    seconds = {name: median(values) for name, values in (first | taken).items()}
    return {"seconds": seconds, "rounds": taken}, min(taken, key=seconds.__getitem__)


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


# -- cuts: unbalanced models on two devices, and every cut there is ----------------------------------------------------

_DEVICES, _MICROBATCHES = 2, 4

_UNBALANCED: Sequence[Callable[[], Subject]] = (
    lambda: subjects.small_gpt(width=64, depth=5, vocab=6000, length=32),
    lambda: subjects.small_resnet(101, side=128, samples=2),
    subjects.small_unet,
    subjects.small_transformer,
    subjects.random_layers,
)


def cuts(*, rounds: int, seconds: float, quick: bool, progress: Progress) -> tuple[list[Found], Table]:
    """A row for each model: the planned cut beside equal counts and the best cut; `quick` is one small model."""
    rows = []
    for make in [lambda: subjects.random_layers(4, samples=4)] if quick else _UNBALANCED:
        subject = make()
        progress(f"measuring {subject.name}")
        profile, count = subject.profile("cpu", _DEVICES, seconds), len(subject.layers)
        # As `make_plan` would cut it.
        wanted = SearchOptions(_MICROBATCHES, ["1f1b"], mesh=Mesh(1, _DEVICES), time_limit=None)
        planned = _shown(search(profile, _DEVICES, wanted, _MICROBATCHES * profile.samples).best.partition)
        equal = _shown(equal_counts(count, _DEVICES))
        made = partial(subjects.planned, profile, _DEVICES, "1f1b", _MICROBATCHES)
        plans = {
            _shown(cut): (made(partition=cut), None) for cut in ((first, count - first) for first in range(1, count))
        }
        times, best = _quickest(subject, plans, [planned, equal], 3, rounds, progress)
        last = times["rounds"]
        row = {"model": subject.name, "layers": count, "planned": planned, "equal": equal, "best": best, **times}
        row |= {
            f"{key} step": f"{row[key]} {cell(times['seconds'][row[key]], 'ms')}"
            for key in ("equal", "planned", "best")
        }
        row |= {"faster_than_equal": ratio(last[equal], last[planned])}
        rows.append({**row, "slower_than_best": ratio(last[planned], last[best]) - 1})
    title = f"cuts\n{_DEVICES} devices, 1f1b, {_MICROBATCHES} microbatches; meant: faster than equal counts, and "
    columns = "model | layers | equal=equal step | planned=planned step | best of all=best step"
    columns += " | faster than equal=faster_than_equal:x | to the best=slower_than_best:+%"
    return rows, tabulated(f"{title}within {NEAR:.0%} of the best cut", rows, columns)


def _shown(cut: Sequence[int]) -> str:
    return "|".join(map(str, cut))


# -- all of them -------------------------------------------------------------------------------------------------------

PARTS = {"prediction": prediction.run, "cuts": cuts, "choice": choice}
_FIGURES = (  # of which part and key the worst is told
    ("prediction", "difference", "predicted to measured step"),
    ("prediction", "bytes_difference", "predicted to measured peak"),
    ("cuts", "slower_than_best", "the planned cut to the best of all"),
    ("choice", "slower", "the picked schedule to the quickest"),
    ("fit", "difference", "predicted to measured peak on a GPU"),
)


def run(
    *,
    parts: Annotated[tuple[str, ...], "which parts of the planner to check", one_of("part", *PARTS)] = tuple(PARTS),
    rounds: Rounds = 7,
    seconds: Annotated[float, "seconds to measure a model", Between(0.001, 600)] = 4.0,
    fit: Annotated[bool, "check only what fits on an NVIDIA GPU, predicted and measured"] = False,
    quick: Annotated[bool, "measure one small model for each part, to see that it runs"] = False,
    progress: Progress = silent,
) -> BenchmarkResult:
    """The parts that were asked for, one after another, and the worst of each. `fit` is that part alone, since nothing
    else needs a GPU.
    """
    more: dict[str, Any] = {"rounds": rounds, "seconds": seconds, "quick": quick, "progress": progress}
    found = {part: PARTS[part](**more) for part in PARTS if part in parts and not fit}
    if fit:
        found = {"fit": fit_.run(seconds=seconds, progress=progress)}
    figures = []
    for part, key, what in _FIGURES:
        known = [row[key] for row in (found[part][0] if part in found else ()) if row[key] is not None]
        meant = "at most +3%" if part in ("cuts", "choice") else "-5% to +10%"
        for word, end in (("least", min), ("greatest", max)) if known else ():
            figures.append(Figure(f"{what}, {word} of {len(known)}", end(known), "difference", meant=meant))
    return BenchmarkResult(
        {part: {"rows": rows} for part, (rows, _) in found.items()}, figures, [table for _, table in found.values()]
    )
