"""What may be recomputed of the stages of a device, so that it fits."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import product

from gapless.plan.cut.stage_costs import Stages
from gapless.plan.plan import Remat
from gapless.plan.search.drafts import Draft
from gapless.schedule import memory
from gapless.schedule.action import Schedule

_SURE = 0.8  # of what must be freed: that much is known before it is tried


def recomputes(
    draft: Draft, device: int, again: Sequence[Remat], flying: Sequence[float], excess: float
) -> list[dict[int, Remat]]:
    """For each way the word of every stage of the device, what costs least time first. Those that can't free the
    `excess` are left out, but for what frees most. `again`: the words there are; `flying`: per stage how many
    microbatches are held at the peak.
    """
    stages, own = draft.alone, draft.choice.placement.stages[device]
    times = stages.costs.per_stage("recompute", stages.placement)
    sizes = stages.costs.per_stage("activation", stages.placement)
    words: tuple[Remat, ...] = ("none", *again)
    options = [dict(zip(own, row, strict=True)) for row in product(words, repeat=len(own))][1:]

    def cost(option: dict[int, Remat]) -> tuple[float, int]:
        extra = sum(float(times[stage]) for stage, word in option.items() if word != "none")
        return float(f"{extra:.9g}"), sum(word == "layer" for word in option.values())

    def freed(option: dict[int, Remat]) -> float:
        back = kept_ = 0.0
        for stage, word in option.items():
            layers = stages.layers[stage]
            inner = sum(layer.boundary for layer in layers[:-1]) if word == "layer" else 0
            if word != "none":
                kept_ += flying[stage] * (float(sizes[stage]) - stages.boundary[stage] - inner)
                one = max(layer.activation for layer in layers)
                back = max(back, one if word == "layer" else float(sizes[stage]))
        return kept_ - back

    most = max(map(freed, options), default=0.0)
    return [each for each in sorted(options, key=cost) if freed(each) >= min(most, _SURE * excess)]


def in_flight_at_peak(schedule: Schedule, stages: Stages) -> tuple[float, ...]:
    """Per stage, when its device holds most: how many times its activations of one microbatch are there."""
    costs = stages.memory_costs
    activation = costs.per_stage("activation", stages.placement)
    found = [0.0] * schedule.num_stages
    for row, changes in zip(schedule.rows, memory.changes(schedule, costs), strict=True):
        held: dict[int, float] = defaultdict(float)
        total = most = 0.0
        for action, (takes, gives) in zip(row, changes, strict=True):
            held[action.stage] += float(takes)
            total += float(takes)
            if total > most:
                most = total
                for stage, size in held.items():
                    found[stage] = size / float(activation[stage]) if activation[stage] else 0.0
            held[action.stage] -= float(gives)
            total -= float(gives)
    return tuple(found)
