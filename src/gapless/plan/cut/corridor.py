"""Where the ends of the best cuts can be at all, when one heavy layer leaves the bound on a stage too wide to tell.

Some cuts are easily found: every stage within the least level that is possible, or a single layer above it. No others
are worth a look unless what is before and what is behind an end, each spread as evenly as its heavy layers let it, has
a smaller sum of squares.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from gapless.schedule.costs import Number


class Corridor:
    """`within` leaves those ends of a stage that cuts with the least sum of squares may have."""

    def __init__(self, times: Sequence[Number], num_stages: int, bound: Number) -> None:
        self.times, self.num_stages = times, num_stages
        low, high = 0.0, float(bound)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if len(self._greedy(middle)) <= num_stages else (middle, high)
        self.least = sum((times[j] - times[i]) ** 2 for i, j in pairwise((0, *self._greedy(high)))) * (1 + 1e-9)
        layers: list[Number] = [after - before if after - before > high else 0 for before, after in pairwise(times)]
        self.lightest = min((layer for layer in layers if layer), default=0)  # of the heavy ones
        self.heavy = [0, *accumulate(layers)]
        self.heavy_squares = [0, *accumulate(layer * layer for layer in layers)]
        self.num_heavy = [0, *accumulate(layer > 0 for layer in layers)]

    def _greedy(self, level: float) -> list[int]:
        times, at = self.times, 0
        ends: list[int] = []
        while at < len(times) - 1 and len(ends) <= self.num_stages:
            at = max(at + 1, bisect_right(times, times[at] + level, at) - 1)
            ends.append(at)
        return ends

    def within(self, ends: Sequence[int], num_before: int) -> list[int]:
        n, behind = len(self.times) - 1, self.num_stages - num_before
        least, spread = self.least, self._spread
        return [j for j in ends if spread(0, j, num_before) + spread(j, n, behind) <= least]

    def _spread(self, start: int, end: int, stages: int) -> Number:
        """The least sum of squares of the layers between two positions, were the light ones a liquid."""
        time, heavy = self.times[end] - self.times[start], self.heavy[end] - self.heavy[start]
        light = stages - (self.num_heavy[end] - self.num_heavy[start])
        if light > 0 and (not heavy or time - heavy <= light * self.lightest):
            return self.heavy_squares[end] - self.heavy_squares[start] + (time - heavy) ** 2 / light
        return time * time / stages if stages else 0
