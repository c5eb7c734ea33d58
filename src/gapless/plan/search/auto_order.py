"""The order that `auto` finds for stages on devices with rooms of their own, some of them recomputed.

`auto` knows one limit, and no recompute. So the bytes of each device count as so many of those of the smallest room;
and a stage that is recomputed has whole backwards, with the recompute in them, and keeps its inputs alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gapless.errors import PlanError, ScheduleError
from gapless.plan.cut.stage_costs import Stages
from gapless.schedule.action import Kind, Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.lower.fusion import with_whole_backwards
from gapless.schedule.recipes.auto import auto
from gapless.schedule.recipes.request import Request
from gapless.units import show_bytes


def auto_order(stages: Stages, rooms: Sequence[float | None], sizes: Mapping[str, Any]) -> Schedule:
    """`rooms`: bytes for activations on each device, None without a limit; `sizes`: what else a `Request` takes."""
    least = min((room for room in rooms if room is not None), default=None)
    costs = _ordered_costs(stages, [least / room if least and room else 0.0 if least else 1.0 for room in rooms])
    try:
        made = auto(Request(costs=costs, memory_limit=least, **sizes), [stages.placement])
    except ScheduleError:
        left = show_bytes(least or 0)
        raise PlanError(f"no order was found that keeps within the {left} left for activations") from None
    return with_whole_backwards(made, {stage for stage, mode in enumerate(stages.remat) if mode != "none"})


def rebuilt(stages: Stages, held: Sequence[int]) -> float:
    """What is there while a stage of a device is recomputed: its activations, or those of one of its layers."""
    sizes = stages.costs.per_stage("activation", stages.placement)
    found = [0.0]
    for stage in held:
        if stages.remat[stage] == "stage":
            found.append(float(sizes[stage]))
        elif stages.remat[stage] == "layer":
            found.append(float(max(layer.activation for layer in stages.layers[stage])))
    return max(found)


def _ordered_costs(stages: Stages, shares: Sequence[float]) -> Costs:
    """What an order is searched with: a stage that is recomputed has whole backwards, with the recompute in them, and
    keeps its inputs alone. A device's bytes count `shares` times.
    """
    costs, placement = stages.costs, stages.placement
    times = costs.durations(placement)
    sizes: dict[str, Any] = {
        name: list(costs.per_stage(name, placement)) for name in ("activation", "kept_for_weight_grad")
    }
    inputs, weights, whole = (list(times[k]) for k in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.BACKWARD))
    for stage, mode in enumerate(stages.remat):
        if mode != "none":
            whole[stage] = inputs[stage] = whole[stage] + times[Kind.RECOMPUTE][stage]
            weights[stage] = 0.0
            if mode == "stage":
                sizes["activation"][stage] = stages.boundary[stage]
            sizes["kept_for_weight_grad"][stage] = 0
        share = shares[placement.homes[stage]]
        for each in sizes.values():
            each[stage] = share * each[stage] if share != 1 else each[stage]
    return replace(costs, input_grad=inputs, weight_grad=weights, backward=whole, recompute=0, **sizes)
