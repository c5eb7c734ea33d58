"""Is the choice right? On emulated devices and links every schedule that fits is run, and the planner's pick is
compared with the quickest.

First every schedule runs twice; then the pick and the quickest of the first part take turns for longer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gapless.bench.planner.link import delay
from gapless.bench.planner.settings import Subject, emulated
from gapless.bench.rounds import Contestant, Progress, median, ratio, take_turns, timed
from gapless.plan.plan import Plan
from gapless.plan.profile.measure import hop
from gapless.plan.profile.profile import Layer, Link, Profile
from gapless.plan.search.search import search
from gapless.view import text

NEAR = 0.03
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
    """`costs` of a layer, `latency` of a link in milliseconds, K devices, M microbatches, and how many MiB a device has
    (None: no limit), where the activation of a layer is 1 MiB.
    """

    costs: str
    K: int
    M: int
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


def run(
    *, rounds: int, seconds: float, quick: bool, progress: Progress, grid: Sequence[Place] = GRID
) -> dict[str, Any]:
    profiles: dict[tuple[str, int], Profile] = {}
    rows = []
    for place in (Place("even", 2, 2, latency=1),) if quick else grid:
        subject = emulated(place.costs, COSTS[place.costs](_LAYERS * place.K))
        if (place.costs, place.K) not in profiles:
            progress(f"measuring {place.costs}")
            profiles[place.costs, place.K] = _sized(subject.profile("cpu", place.K, seconds))
        rows.append(_row(place, subject, _plans(place, profiles[place.costs, place.K]), rounds, progress))
    return {"rows": rows, "near": NEAR}


def _sized(profile: Profile) -> Profile:
    """With sizes of real layers: an emulated one holds next to nothing."""

    def real(layer: Layer) -> Layer:
        return replace(
            layer,
            parameters=0,
            gradients=0,
            optimizer_state=0,
            activation=_MIB,
            kept_for_weight_grad=_MIB,
            boundary=0,
            overlap=0,
            workspace=0,
        )

    return replace(profile, layers=tuple(map(real, profile.layers)), input=0)


def _plans(place: Place, profile: Profile) -> list[Plan]:
    """The best of each recipe, the best of all first."""
    link = Link("emulated", None, hop().latency + place.latency / 1e3)
    found = search(
        replace(profile, links=(link,)),
        place.K,
        memory=None if place.limit is None else place.limit * _MIB,
        microbatches=place.M,
        minibatch=place.M,
        replicas=False,
        slack=0.0,
    )
    best: dict[str, Plan] = {}
    for plan in found.plans:
        best.setdefault(plan.recipe, plan)
    return list(best.values())


def _row(place: Place, subject: Subject, plans: Sequence[Plan], rounds: int, progress: Progress) -> dict[str, Any]:
    inputs, target = subject.batch(place.M)
    pipes = {plan.recipe: subject.pipeline(plan, ["cpu"] * place.K) for plan in plans}
    picked = plans[0].recipe
    try:
        contestants: dict[str, Contestant] = {}
        for recipe, pipe in pipes.items():
            if place.latency:
                delay(pipe, place.latency / 1e3)
            contestants[recipe] = timed(lambda pipe=pipe: pipe.step(inputs, target))  # type: ignore[misc]
        first = take_turns(contestants, 2, progress)
        names = sorted(first, key=lambda recipe: min(first[recipe]))[:_FINALISTS]
        final = {recipe: contestants[recipe] for recipe in dict.fromkeys([picked, *names])}
        seconds = take_turns(final, rounds, progress, warmup=0)
    finally:
        for pipe in pipes.values():
            pipe.close()
    quickest = min(seconds, key=lambda recipe: median(seconds[recipe]))
    return {
        "costs": place.costs,
        "latency": place.latency,
        "devices": place.K,
        "microbatches": place.M,
        "limit": place.limit,
        "picked": picked,
        "quickest": quickest,
        "seconds": {recipe: median(values) for recipe, values in (first | seconds).items()},
        "predicted": {plan.recipe: plan.step_seconds - plan.breakdown.update for plan in plans},
        "slower": ratio(seconds[picked], seconds[quickest]) - 1,
        "rounds": seconds,
    }


def report(found: dict[str, Any]) -> str:
    headings = ("costs", "latency", "K", "M", "limit", "schedules", "picked", "step", "quickest", "step", "")
    rows = [
        (
            row["costs"],
            f"{row['latency']:g} ms",
            str(row["devices"]),
            str(row["microbatches"]),
            "-" if row["limit"] is None else f"{row['limit']} MiB",
            str(len(row["seconds"])),
            row["picked"],
            f"{1000 * row['seconds'][row['picked']]:.1f} ms",
            row["quickest"],
            f"{1000 * row['seconds'][row['quickest']]:.1f} ms",
            f"{100 * row['slower']:+.1f}%",
        )
        for row in found["rows"]
    ]
    right = sum(row["slower"] <= found["near"] for row in found["rows"])
    return "\n".join(
        [
            f"meant: the pick within {found['near']:.0%} of the quickest of all schedules that fit",
            "",
            text.table(headings, rows, left=1),
            "",
            f"within {found['near']:.0%}: {right} of {len(rows)}",
        ]
    )
