"""Why the best plan is the best, in two sentences."""

from collections.abc import Sequence
from dataclasses import fields

from gapless.plan.plan import Plan
from gapless.plan.predict.breakdown import Breakdown
from gapless.plan.profile.profile import Link
from gapless.units import show_bytes, show_seconds

PARTS = {part.name: part.name for part in fields(Breakdown)}
PARTS |= {"imbalance": "load imbalance", "update": "weight update"}


def explained(plans: Sequence[Plan], num_rejected: int) -> str:
    """The first of `plans` against the next kind of plan, and how full it makes its devices."""
    return f"{_against_the_next(plans)} {_memory(plans[0], num_rejected)}"


def _against_the_next(plans: Sequence[Plan]) -> str:
    best = plans[0]
    said = f"{best.title} is predicted to take {show_seconds(best.step_seconds)} a step"
    other = next((plan for plan in plans if _kind(plan) != _kind(best)), None)
    if other is None:
        return f"{said}; no other kind of plan was possible."
    more = 100 * (other.step_seconds / best.step_seconds - 1)
    if more < 0.05:
        return f"{said}; the next kind, {other.title}, takes as long to within 0.1%."
    gains = {part: getattr(other.breakdown, part) - getattr(best.breakdown, part) for part in PARTS}
    most = max(gains, key=gains.__getitem__)
    one, two = (show_seconds(getattr(plan.breakdown, most)) for plan in (best, other))
    reason = f"{more:.1f}% longer, most of it {PARTS[most]} ({two} against {one})"
    return f"{said}; the next kind, {other.title}, takes {reason}."


def _kind(plan: Plan) -> tuple[str, int, int]:
    return plan.recipe, plan.stages_per_device, plan.mesh.replicas


def _memory(plan: Plan, num_rejected: int) -> str:
    totals = [held.total for held in plan.memory]
    limited = [device for device, limit in enumerate(plan.limits) if limit is not None]
    others = f"{num_rejected} other choice{' was' if num_rejected == 1 else 's were'} rejected"
    if not limited:
        return f"Its fullest device holds {show_bytes(max(totals))}, there is no limit, and {others}."
    device = max(limited, key=lambda number: totals[number] / (plan.limits[number] or 1))
    limit = plan.limits[device] or 1
    return (
        f"Its fullest device, {device}, holds {show_bytes(totals[device])} of {show_bytes(limit)} "
        f"({100 * totals[device] / limit:.0f}%), and {others}."
    )


def assumed(flops: float, links: Sequence[Link]) -> str:
    """The caution of a plan for which nothing was run."""
    told = "links as given" if links else "links that cost nothing"
    return (
        f"nothing was run: times are FLOPs at {flops / 1e12:g} TFLOP/s with {told}, so steps are for comparing plans; "
        "sizes are those of tensors without data"
    )
