"""Which layers make which stage: exact, by the cost of the slowest stage, then by how evenly the rest is spread."""

from collections.abc import Sequence
from itertools import accumulate

from gapless.errors import PartitionError


def balanced(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Layers per stage such that the costliest stage is as cheap as possible, and the sum of squares is then the least.

    >>> balanced([1] * 16, 4)
    (4, 4, 4, 4)
    """
    n = len(costs)
    check_enough_layers(n, num_stages)
    sums = [0.0, *accumulate(costs)]
    bound = _least_maximum(costs, num_stages)
    # best[j]: least sum of squares of the first j layers in the stages so far, each within the bound.
    infinity = float("inf")
    best = [0.0] + [infinity] * n
    cuts: list[list[int]] = []
    for stage in range(1, num_stages + 1):
        new, cut = [infinity] * (n + 1), [0] * (n + 1)
        for end in range(stage, n - (num_stages - stage) + 1):
            for start in range(end - 1, stage - 2, -1):
                cost = sums[end] - sums[start]
                if cost > bound * (1 + 1e-12):
                    break
                value = best[start] + cost * cost
                if value < new[end]:
                    new[end], cut[end] = value, start
        best = new
        cuts.append(cut)
    counts, end = [], n
    for cut in reversed(cuts):
        counts.append(end - cut[end])
        end = cut[end]
    return tuple(reversed(counts))


def check_enough_layers(num_layers: int, num_stages: int) -> None:
    if num_layers < num_stages:
        raise PartitionError(
            f"the model has {num_layers} layers, but {num_stages} stages were asked for: use fewer devices or stages "
            "per device, or cut the model into smaller layers"
        )


def _least_maximum(costs: Sequence[float], num_stages: int) -> float:
    """The least bound under which `num_stages` stages hold all layers: searched among the sums that occur."""
    low, high = max(costs), sum(costs)
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if _stages_needed(costs, middle) <= num_stages:
            high = middle
        else:
            low = middle
    return low if _stages_needed(costs, low) <= num_stages else high


def _stages_needed(costs: Sequence[float], bound: float) -> int:
    count, held = 1, 0.0
    for cost in costs:
        if held + cost > bound:
            count, held = count + 1, 0.0
        held += cost
    return count
