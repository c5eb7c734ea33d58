"""PipeDream's planner: which layers make a stage, and how often each stage is replicated, without a flush.

In steady state all stages work at the same time, so what counts is the slowest of them and of the hops between them.
A stage of layers i..j on m parts of a machine takes 1/m of the time per minibatch, since each part takes every m-th.
But every minibatch has an update, for which the parts sum their gradients around a ring, as those of a mesh do:

    T(i..j, m) = max(time of i..j on one part / m, all-reduce of |w| among m)
    A(i..j, m) = min( T(i..j, m), min over s, m' of max(A(i..s, m-m'), 2 boundary(s) / bandwidth, T(s+1..j, m')) )

The all-reduce is `Link.all_reduce`: 2(m-1)|w| / (m bandwidth), and 2(m-1) latencies. PipeDream's paper counts m
minibatches at once and writes (1/m) max(time, 2(m-1)|w| / bandwidth): the same, for m of these are m all-reduces.

Of equal times the one that holds fewer weights in all is taken. A part is a device, or on the next level of the machine
a whole group of devices that was planned by the same rule. The time is that of one microbatch: without a flush, that is
a minibatch.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from gapless.errors import PlanError
from gapless.plan.profile.machine import check_reach
from gapless.plan.profile.profile import Link, Profile

_ROUNDING = 1e-12


@dataclass(frozen=True)
class Replication:
    """Layers per stage and devices per stage, and the time per minibatch that the slowest stage or hop allows."""

    partition: tuple[int, ...]
    replicas: tuple[int, ...]
    seconds: float

    @property
    def num_devices(self) -> int:
        return sum(self.replicas)

    @property
    def in_flight(self) -> int:
        """NOAM: minibatches that each replica of the first stage admits, so that all stages have work."""
        return math.ceil(self.num_devices / self.replicas[0])

    def __str__(self) -> str:
        return "-".join(map(str, self.replicas))


def replicate(profile: Profile, num_devices: int) -> Replication:
    """The best stages and replicas on `num_devices` devices, whose links are those of the profile."""
    check_reach(profile, num_devices)
    levels = _levels(profile.links, num_devices)
    below: _Level | None = None
    for number, (link, parts) in enumerate(levels):
        # Only the outermost level is asked for the model as a whole; a lower one is for every run of layers.
        below = _Level(profile, link, parts, below, whole=number == len(levels) - 1)
    assert below is not None
    n = len(profile.layers)
    counts, replicas = zip(*below.stages(0, n, below.num_parts), strict=True)
    return Replication(counts, replicas, below.best(0, n, below.num_parts))


def _levels(links: Sequence[Link], num_devices: int) -> list[tuple[Link, int]]:
    """Each link that the devices need, and how many parts it connects."""
    found: list[tuple[Link, int]] = []
    within = 1
    for link in links or (Link("free"),):
        reach = min(num_devices, link.devices or num_devices)
        if reach % within:
            raise PlanError(
                f"{num_devices} devices are not a whole number of groups of {within}, which {link.name} connects: use "
                f"{num_devices // within * within} or {(num_devices // within + 1) * within}"
            )
        found.append((link, reach // within))
        within = reach
    return [level for level in found if level[1] > 1] or found[:1]


class _Level:
    """A(i..j, m) for the parts of one level, and how it was reached."""

    def __init__(self, profile: Profile, link: Link, num_parts: int, below: "_Level | None", whole: bool) -> None:
        self.profile, self.link, self.num_parts, self.below = profile, link, num_parts, below
        n = len(profile.layers)
        self._times = [0.0, *accumulate(layer.work for layer in profile.layers)]
        self._sizes = [0.0, *accumulate(float(layer.gradients) for layer in profile.layers)]
        self.hops = [2 * link.seconds(layer.boundary) for layer in profile.layers]
        # By [i][m][j]: A of the layers from i to before j on m parts, and the weights that all devices hold then.
        self._best: dict[int, list[list[float]]] = {}
        self._held: dict[int, list[list[float]]] = {}
        self._choice: dict[tuple[int, int, int], tuple[int, int]] = {}
        for first in [0] if whole else range(n):
            self._fill(first)

    def best(self, start: int, end: int, parts: int) -> float:
        return self._best[start][parts][end]

    def replicated(self, start: int, end: int, parts: int) -> float:
        """T: one stage of these layers on so many parts."""
        if self.below is None:
            alone = self._times[end] - self._times[start]
        else:
            alone = self.below.best(start, end, self.below.num_parts)
        return max(alone / parts, self.link.all_reduce(self._sizes[end] - self._sizes[start], parts))

    def _weights(self, start: int, end: int, parts: int) -> float:
        """What so many copies of these layers hold."""
        if self.below is None:
            return parts * (self._sizes[end] - self._sizes[start])
        return parts * self.below._held[start][self.below.num_parts][end]

    def _fill(self, first: int) -> None:
        n, m = len(self.profile.layers), self.num_parts
        rows = self._best[first] = [[math.inf] * (n + 1) for _ in range(m + 1)]
        held = self._held[first] = [[math.inf] * (n + 1) for _ in range(m + 1)]
        least: list[list[float]] = [[]]  # the least of each row from a place on
        for parts in range(1, m + 1):
            row = rows[parts]
            for end in range(first + 1, n + 1):
                row[end] = self.replicated(first, end, parts)
                held[parts][end] = self._weights(first, end, parts)
                for last in range(1, parts):
                    self._try_cuts(first, end, parts, last, least[parts - last])
            least.append([*accumulate(reversed(row), min)][::-1])

    def _try_cuts(self, first: int, end: int, parts: int, last_parts: int, least_before: Sequence[float]) -> None:
        """Every cut before a last stage on `last_parts`. It starts about where what is before and the last stage take
        equally long, and goes either way until what is before, or the last stage of single devices, is too slow alone.
        """
        before, row = self._best[first][parts - last_parts], self._best[first][parts]

        def slower_before(cut: int) -> bool:
            return before[cut] >= self.replicated(cut, end, last_parts)

        meeting = bisect_left(range(first + 1, end), True, key=slower_before) + first + 1
        for cut in range(meeting, end):
            if least_before[cut] > row[end] * (1 + _ROUNDING):
                break
            self._try(first, end, parts, last_parts, cut)
        for cut in range(meeting - 1, first, -1):
            if self.below is None and self.replicated(cut, end, last_parts) > row[end] * (1 + _ROUNDING):
                break
            self._try(first, end, parts, last_parts, cut)

    def _try(self, first: int, end: int, parts: int, last_parts: int, cut: int) -> None:
        row = self._best[first][parts]
        time = max(
            self._best[first][parts - last_parts][cut], self.hops[cut - 1], self.replicated(cut, end, last_parts)
        )
        if time > row[end] * (1 + _ROUNDING):
            return
        held = self._held[first]
        weights = held[parts - last_parts][cut] + self._weights(cut, end, last_parts)
        if time < row[end] * (1 - _ROUNDING) or weights < held[parts][end]:
            row[end], held[parts][end] = min(time, row[end]), weights
            self._choice[first, parts, end] = (cut, last_parts)

    def stages(self, start: int, end: int, parts: int) -> list[tuple[int, int]]:
        """(layers, devices) of each stage: a part that has stages of its own is replicated stage by stage."""
        choice = self._choice.get((start, parts, end))
        if choice is not None:
            cut, last_parts = choice
            return self.stages(start, cut, parts - last_parts) + self._last(cut, end, last_parts)
        return self._last(start, end, parts)

    def _last(self, start: int, end: int, parts: int) -> list[tuple[int, int]]:
        if self.below is None:
            return [(end - start, parts)]
        return [(count, parts * each) for count, each in self.below.stages(start, end, self.below.num_parts)]
