"""Costs from timelines: what was measured once, simulated for whatever one likes."""

import statistics
from collections import defaultdict
from collections.abc import Sequence

from gapless.schedule.action import Kind
from gapless.schedule.costs import Costs
from gapless.schedule.timeline import Timeline


def costs_of(timelines: Sequence[Timeline]) -> Costs:
    """Per stage the median time of each kind of action.

    Where a stage ran only whole backwards, half of one is taken for an I and half for a W; where it ran only halves, a
    whole one is taken for both together.
    """
    taken: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        for action, start, end in timeline.all_spans:
            taken[action.kind, action.stage].append(float(end - start))
    median = {place: statistics.median(seconds) for place, seconds in taken.items()}
    stages = range(timelines[0].schedule.num_stages)
    whole = [median.get((Kind.BACKWARD, stage)) for stage in stages]
    halves = [(median.get((Kind.INPUT_GRAD, stage)), median.get((Kind.WEIGHT_GRAD, stage))) for stage in stages]
    inputs = [i if i is not None else (b or 0) / 2 for (i, _), b in zip(halves, whole, strict=True)]
    weights = [w if w is not None else (b or 0) / 2 for (_, w), b in zip(halves, whole, strict=True)]
    return Costs(
        forward=[median.get((Kind.FORWARD, stage), 0) for stage in stages],
        input_grad=inputs,
        weight_grad=weights,
        backward=[b if b is not None else i + w for b, i, w in zip(whole, inputs, weights, strict=True)],
        recompute=[median.get((Kind.RECOMPUTE, stage), 0) for stage in stages],
    )
