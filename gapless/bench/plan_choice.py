"""Is the choice right? On emulated devices every schedule that fits is run, and the one that the planner would have
picked is compared with the quickest.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gapless.bench.plan_settings import Subject, emulated, threads_hop
from gapless.bench.rounds import Progress, median, ratio, take_turns, timed
from gapless.plan.plan import Plan
from gapless.plan.profile import Layer, Profile
from gapless.plan.search import search
from gapless.view import text

NEAR = 0.03
RECIPES = ("gpipe", "1f1b", "zb-h1", "interleaved", "zb-v", "v-half")
_MIB = 2**20

# name, (F, I, W) of a layer in ms, K, M, how many MiB a device has (a layer's activation is 1 MiB); None: no limit
Place = tuple[str, tuple[float, float, float], int, int, int | None]
GRID: tuple[Place, ...] = (
    ("even", (3.0, 3.0, 3.0), 2, 4, None),
    ("even", (3.0, 3.0, 3.0), 4, 8, None),
    ("even", (3.0, 3.0, 3.0), 4, 8, 34),
    ("light W", (3.0, 4.0, 1.5), 4, 8, None),
    ("light W", (3.0, 4.0, 1.5), 2, 4, 34),
    ("heavy W", (2.0, 2.0, 5.0), 4, 4, None),
)


def run(*, rounds: int, seconds: float, quick: bool, progress: Progress) -> dict[str, Any]:
    rows = []
    for place in (("even", (0.5, 0.5, 0.5), 2, 2, None),) if quick else GRID:
        name, costs, devices, M, limit = place
        subject = emulated(name, [costs] * (4 * devices))
        progress(f"measuring {name}")
        profile = _sized(threads_hop(subject.profile("cpu", devices, seconds)))
        memory = None if limit is None else limit * _MIB
        # `auto` is left out: it finds the same schedules or better ones, which no other could be compared with.
        found = search(profile, devices, memory=memory, microbatches=M, minibatch=M, recipes=RECIPES, replicas=False)
        plans = _one_of_each(found.plans)
        rows.append(_row(place, subject, plans, rounds, progress))
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


def _one_of_each(plans: Sequence[Plan]) -> list[Plan]:
    """The best of each recipe, the best of all first."""
    found: dict[str, Plan] = {}
    for plan in plans:
        found.setdefault(plan.recipe, plan)
    return list(found.values())


def _row(place: Place, subject: Subject, plans: Sequence[Plan], rounds: int, progress: Progress) -> dict[str, Any]:
    name, costs, devices, M, limit = place
    inputs, target = subject.batch(M)
    pipes = {plan.recipe: subject.pipeline(plan, ["cpu"] * devices) for plan in plans}
    try:
        contestants = {
            recipe: timed(lambda pipe=pipe: pipe.step(inputs, target))  # type: ignore[misc]
            for recipe, pipe in pipes.items()
        }
        seconds = take_turns(contestants, rounds, progress)
    finally:
        for pipe in pipes.values():
            pipe.close()
    picked, quickest = plans[0].recipe, min(seconds, key=lambda recipe: median(seconds[recipe]))
    return {
        "costs": name,
        "milliseconds": list(costs),
        "devices": devices,
        "microbatches": M,
        "limit": limit,
        "picked": picked,
        "quickest": quickest,
        "seconds": {recipe: median(values) for recipe, values in seconds.items()},
        "predicted": {plan.recipe: plan.step_seconds - plan.breakdown.update for plan in plans},
        "slower": ratio(seconds[picked], seconds[quickest]) - 1,
        "rounds": seconds,
    }


def report(found: dict[str, Any]) -> str:
    headings = ("costs", "K", "M", "limit", "picked", "step", "quickest", "step", "")
    rows = [
        (
            row["costs"],
            str(row["devices"]),
            str(row["microbatches"]),
            "-" if row["limit"] is None else f"{row['limit']} MiB",
            row["picked"],
            f"{1000 * row['seconds'][row['picked']]:.1f} ms",
            row["quickest"],
            f"{1000 * row['seconds'][row['quickest']]:.1f} ms",
            f"{100 * row['slower']:+.1f}%",
        )
        for row in found["rows"]
    ]
    return "\n".join(
        [f"meant: the pick within {found['near']:.0%} of the quickest", "", text.table(headings, rows, left=1)]
    )
