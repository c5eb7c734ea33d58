"""PipeDream's planner: which layers make a stage, and how often each stage is replicated, without a flush.

In steady state all stages work at the same time, so what counts is the slowest of them and of the hops between them.
A stage of layers i..j on m parts of a machine takes 1/m of the time per minibatch, since each part takes every m-th.
But every minibatch has an update, for which the parts sum their gradients around a ring, as those of a mesh do:

    T(i..j, m) = max(time of i..j on one part / m, all-reduce of |w| among m)
    A(i..j, m) = min( T(i..j, m), min over s, m' of max(A(i..s, m-m'), hop behind s, T(s+1..j, m')) )

The all-reduce is `Link.all_reduce`: 2(m-1)|w| / (m bandwidth), and 2(m-1) latencies. PipeDream's paper counts m
minibatches at once and writes (1/m) max(time, 2(m-1)|w| / bandwidth): the same, for m of these are m all-reduces. A hop
is there and back, 2 (boundary / bandwidth + latency). PipeDream's program counts otherwise, and its plans are found
with its own form (`PIPEDREAM`).

Of equal times the one that holds fewer weights in all is taken. A part is a device, or on the next level of the machine
a whole group of devices that was planned by the same rule. The time is that of one microbatch: without a flush, that is
a minibatch.

Only so many minibatches are under way (`in_flight`), and each takes a whole round trip, hops included. So a step takes
no less than round trip / minibatches under way, however quick the slowest stage is: data parallelism alone, which has
no hops, is taken where that is quicker.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from gapless.errors import PlanError
from gapless.plan.asynchronous.stage_times import RING, Form
from gapless.plan.profile.machine import check_reach
from gapless.plan.profile.profile import Link, Profile
from gapless.units import show_bytes, show_count

_ROUNDING = 1e-12


@dataclass(frozen=True)
class Replication:
    """Layers per stage and devices per stage.

    slowest  the time per minibatch that the slowest stage or hop allows
    seconds  the same with what is under way: a round trip has to fit too
    memory   bytes of a device of each stage: weights of as many versions as are in use, and as many activations
    """

    partition: tuple[int, ...]
    replicas: tuple[int, ...]
    slowest: float
    seconds: float
    memory: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        return sum(self.replicas)

    @property
    def in_flight(self) -> int:
        """NOAM: minibatches that each replica of the first stage admits, so that all stages have work."""
        return math.ceil(self.num_devices / self.replicas[0])

    def __str__(self) -> str:
        return "-".join(map(str, self.replicas))


def replicate(
    profile: Profile, num_devices: int, *, form: Form = RING, memory: int | None = None, straight: bool = False
) -> Replication:
    """The best stages and replicas on `num_devices` devices, whose links are those of the profile.

    form      how times are counted
    memory    bytes of each device. Where several levels of links make a plan that does not fit, all devices are planned
              as one level with the outermost link: its time is then an upper bound
    straight  one device per stage, as many stages as there are devices
    """
    check_reach(profile, num_devices)
    levels = _levels(profile.links, num_devices)
    found = _planned(profile, levels, form, memory if len(levels) == 1 else None, straight)
    if found is not None and len(levels) > 1 and memory is not None and max(found.memory) > memory:
        found = _planned(profile, [(levels[-1][0], num_devices)], form, memory, straight)
    if found is None and memory is None:
        layers = show_count(len(profile.layers), "layer")
        raise PlanError(f"{layers} can't make {num_devices} stages, one for each device: use fewer")
    if found is None:
        raise PlanError(
            f"no way to cut {show_count(len(profile.layers), 'layer')} fits on {show_count(num_devices, 'device')} "
            f"with {show_bytes(memory or 0)}: use more devices, or larger ones"
        )
    if form is RING and not straight and len(found.replicas) > 1:
        alone = _replication(profile, (len(profile.layers),), (num_devices,), _in_one(profile, levels, form), form)
        if alone.seconds < found.seconds and (memory is None or max(alone.memory) <= memory):
            return alone
    return found


def _planned(
    profile: Profile, levels: Sequence[tuple[Link, int]], form: Form, memory: int | None, straight: bool
) -> Replication | None:
    below: _Level | None = None
    for number, (link, parts) in enumerate(levels):
        # Only the outermost level is asked for the model as a whole; a lower one is for every run of layers.
        whole = number == len(levels) - 1
        below = _Level(profile, link, parts, below, whole=whole, form=form, memory=memory, straight=straight)
    assert below is not None
    n = len(profile.layers)
    slowest = below.best(0, n, below.num_parts)
    if slowest == math.inf:
        return None
    counts, replicas = zip(*below.stages(0, n, below.num_parts), strict=True)
    return _replication(profile, counts, replicas, slowest, form)


def _in_one(profile: Profile, levels: Sequence[tuple[Link, int]], form: Form) -> float:
    """The time of one stage on all devices."""
    time, inner = sum(layer.work for layer in profile.layers), 1
    weights = sum(layer.gradients for layer in profile.layers)
    for link, parts in levels:
        time, inner = form.stage(link, time, weights, parts, inner), parts
    return time


def _replication(
    profile: Profile, partition: tuple[int, ...], replicas: tuple[int, ...], slowest: float, form: Form
) -> Replication:
    ends = list(accumulate(partition))
    devices = list(accumulate(replicas))
    trip = sum(layer.work for layer in profile.layers)
    for end, behind in zip(ends[:-1], devices[:-1], strict=True):
        trip += form.hop(profile.link(behind - 1, behind), profile.layers[end - 1].boundary, 1)
    under_way = math.ceil(devices[-1] / replicas[0]) * replicas[0]
    return Replication(
        partition,
        replicas,
        slowest,
        max(slowest, trip / under_way) if form is RING else slowest,
        tuple(
            _memory(profile, end - count, end, versions_kept(devices[-1], behind - copies, copies))
            for end, count, behind, copies in zip(ends, partition, devices, replicas, strict=True)
        ),
    )


def versions_kept(num_devices: int, before: int, replicas: int) -> int:
    """How many minibatches a device of a stage has begun and not ended, each with weights of its own: those that it is
    ahead, and the one at hand. `before` are the devices of the stages before.
    """
    return (num_devices - 1 - before) // replicas + 1


def _memory(profile: Profile, start: int, end: int, versions: int) -> int:
    layers = profile.layers[start:end]
    fixed = sum(versions * layer.parameters + layer.gradients + layer.optimizer_state for layer in layers)
    comes_and_goes = versions * sum(layer.activation for layer in layers)
    comes_and_goes += max(layer.most_workspace for layer in layers)
    return profile.reserved + fixed + math.ceil(comes_and_goes * (1 + profile.slack))


def _levels(links: Sequence[Link], num_devices: int) -> list[tuple[Link, int]]:
    """Each link that the devices need, and how many parts it connects."""
    found: list[tuple[Link, int]] = []
    within = 1
    for link in links or (Link("free"),):
        reach = min(num_devices, link.devices or num_devices)
        if reach % within:
            raise PlanError(
                f"{show_count(num_devices, 'device')} can't be shared out into groups of {within}, which {link.name} "
                f"connects: use {num_devices // within * within} or {(num_devices // within + 1) * within}"
            )
        found.append((link, reach // within))
        within = reach
    return [level for level in found if level[1] > 1] or found[:1]


class _Level:
    """A(i..j, m) for the parts of one level, and how it was reached."""

    def __init__(
        self,
        profile: Profile,
        link: Link,
        num_parts: int,
        below: "_Level | None",
        *,
        whole: bool,
        form: Form,
        memory: int | None,
        straight: bool,
    ) -> None:
        self.profile, self.link, self.num_parts, self.below = profile, link, num_parts, below
        self._form, self._memory, self._straight = form, memory, straight
        self._inner = below.num_parts if below is not None else 1
        n = len(profile.layers)
        self._times = [0.0, *accumulate(layer.work for layer in profile.layers)]
        self._sizes = [0.0, *accumulate(float(layer.gradients) for layer in profile.layers)]
        # By [i][m][j]: A of the layers from i to before j on m parts, and the weights that all devices hold then.
        self._best: dict[int, list[list[float]]] = {}
        self._held: dict[int, list[list[float]]] = {}
        self._choice: dict[tuple[int, int, int], tuple[int, int]] = {}
        for first in [0] if whole else range(n):
            self._fill(first)

    def best(self, start: int, end: int, parts: int) -> float:
        return self._best[start][parts][end]

    def replicated(self, start: int, end: int, parts: int, inner: int = 1) -> float:
        """T: one stage of these layers on so many parts."""
        if self.below is None:
            alone = self._times[end] - self._times[start]
        else:
            alone = self.below.best(start, end, self.below.num_parts)
        return self._form.stage(self.link, alone, self._sizes[end] - self._sizes[start], parts, inner)

    def _fits(self, start: int, end: int, parts: int, before: int) -> bool:
        """One stage on so many parts, behind those `before`."""
        if self._straight and parts > 1:
            return False
        if self._memory is None:
            return True
        versions = versions_kept(self.num_parts, before, parts)
        return _memory(self.profile, start, end, versions) <= self._memory

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
                if self._fits(first, end, parts, 0):
                    row[end] = self.replicated(first, end, parts, self._inner)
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
        layers, form = self.profile.layers, self._form
        time = max(
            self._best[first][parts - last_parts][cut],
            form.hop(self.link, layers[cut - 1].boundary, last_parts),
            form.leaving(self.link, layers[end - 1].boundary, last_parts) if end < len(layers) else 0.0,
            self.replicated(cut, end, last_parts),
        )
        if time > row[end] * (1 + _ROUNDING) or time == math.inf:
            return
        if not self._fits(cut, end, last_parts, parts - last_parts):
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
