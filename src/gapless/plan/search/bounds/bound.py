"""What no plan of a choice can be below, however the model is cut, ordered and recomputed.

The bounds come from the actions alone, never from a plan that was found. A backward takes at least the quicker of a
whole B and an I with a W, since lowering may split and fuse. With x the time of a stage for one microbatch:

    every device is busy all the time                M sum(x) / devices
    layers can't be cut: one device has more         M times what the fullest of all devices has
    one microbatch goes down and back up             sum(F) + sum(I)
    a line of stages fills, and drains               F of the stages before, M x, and then I of the stages before
    memory: what a layer leaves behind is held while the microbatch goes down and back up, or is made again
    a device that is full waits for the first backward; the busiest device too, on top of all its work
    the busiest device has the gradients of its last stage to add up, behind all its work

In a line the last but one holds for each stage, wherever it starts, so the best of all cuts is found layer by layer.
Where weight gradients may wait, only the F before a stage count.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from itertools import accumulate

from gapless.plan.profile.machine import Mesh
from gapless.plan.profile.profile import Profile
from gapless.plan.search.bounds.end_devices import EndDevices
from gapless.plan.search.bounds.least_work import ROUNDING, WHOLE, LeastWork, Limits, alike, entry_work, layer_works
from gapless.plan.search.bounds.warm_up import Fill, waited
from gapless.schedule.placement import Placement
from gapless.schedule.recipes import find_recipe


class Bounds:
    """The bounds of choices on one profile of so many samples."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._works = cache(lambda together: layer_works(profile, together))
        self._any = cache(self._of_any_recipe)
        self._line = cache(self._best_line)
        ends = self._ends
        self._vee, self._loop, self._ended = cache(ends.vee), cache(ends.loop), cache(ends.line)
        self._in_room = cache(self._pace_in_room)
        self._packed = cache(lambda devices: packed([work.all for work in self._works(True)], devices))

    def seconds(
        self,
        recipe: str,
        stages_per_device: int,
        mesh: Mesh,
        microbatches: int,
        speeds: Sequence[float],
        room: Limits | None = None,
        enough: float = math.inf,
    ) -> float:
        """Of a step, with the sum of gradients and the update. `room`: None without a limit. What takes longer to know
        is left out where the rest is `enough`.
        """
        found = self._any(stages_per_device, mesh, microbatches, tuple(speeds), room)
        if found * (1 - ROUNDING) >= enough:
            return found * (1 - ROUNDING)
        if mesh.num_devices > 1 and stages_per_device == 1:
            line = self._line(tuple(speeds), microbatches, recipe in WHOLE)
            found = max(found, line + self._update(speeds))
            if room is not None and len(set(speeds)) == 1:
                found = max(found, self._ended(mesh, microbatches, speeds[0], room) + self._update(speeds))
        elif mesh.num_devices > 1 and len(set(speeds)) == 1:
            ends = self._at_ends(recipe, stages_per_device, mesh, microbatches, speeds[0], room)
            found = max(found, ends + self._update(speeds))
        return found * (1 - ROUNDING)

    def _at_ends(
        self, recipe: str, stages_per_device: int, mesh: Mesh, M: int, speed: float, room: Limits | None
    ) -> float:
        if find_recipe(recipe).placement != "loop":
            return self._vee(mesh, M, speed, room)
        return self._loop(mesh, stages_per_device, M, speed, room) if recipe in WHOLE else 0.0

    def _of_any_recipe(
        self, stages_per_device: int, mesh: Mesh, M: int, speeds: tuple[float, ...], room: Limits | None
    ) -> float:
        K, power, fastest = mesh.num_devices, sum(speeds), max(speeds)
        alone = K * mesh.replicas == 1
        profile, works = self.profile, self._works(not alone)
        entry = entry_work(profile, alone=alone)
        total = sum(work.all for work in works) + K * stages_per_device * entry.all
        gradients = sum(layer.gradients for layer in profile.layers)
        if K == 1:
            return M * total / fastest + mesh.sum_seconds(profile, 0, gradients) + self._update(speeds)
        once = sum(work.forward + work.handed for work in works) / fastest
        found = max(M * total / power, once, M * (max(work.all for work in works) + entry.all) / fastest)
        if room is not None:
            together = self._together(room)
            found = max(found, M * self._in_room(together, power, fastest))
            if found == math.inf:
                return found
            idle = waited(self._fills, M, together, entry.forward, fastest, power)
            found = max(found, (M * total + idle) / power)
        if len(set(speeds)) == 1:
            found = max(found, self._busiest(mesh, stages_per_device, M, entry, fastest, room))
        if stages_per_device == 1:
            found = max(found, self._with_sums(mesh, M * total, gradients, speeds))
        return found + self._update(speeds)

    def _update(self, speeds: Sequence[float]) -> float:
        return sum(layer.update.median for layer in self.profile.layers) / sum(speeds)

    def work(self, together: bool) -> float:
        """Of all layers for one microbatch, at the least."""
        return sum(work.all for work in self._works(together)) * (1 - ROUNDING)

    def _with_sums(self, mesh: Mesh, busy: float, gradients: float, speeds: Sequence[float]) -> float:
        """In a line a device sums the gradients of its stage when all its work is done."""
        if mesh.replicas == 1:
            return 0.0
        sums = min(mesh.sum_seconds(self.profile, position, gradients) for position in range(mesh.num_devices))
        return (busy + min(speeds) * sums) / sum(speeds)

    def _pace_in_room(self, room: float, power: float, fastest: float) -> float:
        """Seconds for each microbatch that so many bytes for activations allow on devices of `power` together.

        A layer either holds its activations while the layers after it run forward and backward, and so much of the
        room for so long; or it is recomputed. What holds most for the least recompute is recomputed first.
        """
        works, fills = self._works(True), self._fills
        down_and_up = list(accumulate(reversed([w.forward + w.handed for w in works])))[::-1]
        items = [(fill.again, fill.size * seconds / fastest) for fill, seconds in zip(fills, down_and_up, strict=True)]
        busy = sum(work.all for work in works)
        # All that a microbatch leaves behind is there at once, too, when it has ended its forwards.
        least = _recomputed([(fill.again, fill.size) for fill in fills], room)
        if least == math.inf:
            return math.inf
        low = high = (busy + least) / power
        if low * room < sum(held for _, held in items):
            high = max(low, (busy + sum(again for again, _ in items)) / power)
            for _ in range(40):
                middle = (low + high) / 2
                fits = busy + _recomputed(items, room * middle) <= power * middle
                low, high = (low, middle) if fits else (middle, high)
        return low

    def _busiest(
        self, mesh: Mesh, stages_per_device: int, M: int, entry: LeastWork, speed: float, room: Limits | None
    ) -> float:
        """The busiest of equal devices, whichever layers each has: with 94 blocks of 9 ms and a head of 20 ms on 16 of
        them, one has the head and 4 blocks, or another has 7. It holds the parameters of so many layers at the least.
        """
        works, layers = [work.all for work in self._works(True)], self.profile.layers
        load = max(self._packed(mesh.num_devices), sum(works) / mesh.num_devices)
        idle = 0.0
        if room is not None:
            kept = [layer.kept(room.shards) for layer in layers]
            fixed = _least_with(zip(kept, works, strict=True), load) * (1 - ROUNDING) + self.profile.reserved
            left = max(0.0, (max(room.each) - fixed) / (1 + room.slack))
            idle = waited(self._fills, M, left, entry.forward, speed, speed)
        gradients = [float(layer.gradients) for layer in layers]
        last = min(gradients)
        if stages_per_device == 1:
            last = _least_with(zip(gradients, works, strict=True), load) * (1 - ROUNDING)
        sums = min(mesh.sum_seconds(self.profile, place, last) for place in range(mesh.num_devices))
        return (M * (load + stages_per_device * entry.all) + idle) / speed + sums

    def _together(self, room: Limits) -> float:
        """Bytes that the devices of a pipeline have for activations; below 0 where nothing fits at all."""
        fixed = sum(layer.kept(room.shards) for layer in self.profile.layers)
        return (sum(room.each) - len(room.each) * self.profile.reserved - fixed) / (1 + room.slack)

    @cached_property
    def _ends(self) -> EndDevices:
        return EndDevices(self.profile, self._works(True), self._fills, entry_work(self.profile, alone=False))

    @cached_property
    def _fills(self) -> list[Fill]:
        slower = min(1.0, self.profile.contention.forward)
        return [
            Fill(work.forward, slower * layer.recompute.median, layer.held)
            for work, layer in zip(self._works(True), self.profile.layers, strict=True)
        ]

    def _best_line(self, speeds: tuple[float, ...], M: int, whole: bool) -> float:
        """A line that fills and drains, at its best cuts: the least T such that stages as long as T allows
        reach the last layer. A stage that starts later may end later, so the longest are the best.
        """
        works, fastest = self._works(True), max(speeds)
        if len(works) < len(speeds):
            return 0.0
        busy = [0.0, *accumulate(work.all for work in works)]
        before = [0.0, *accumulate((w.forward + (w.handed if whole else 0.0)) / fastest for w in works)]
        # The last weight gradient of a stage holds nobody up; of a layer it is at most so much of its work.
        last = max((w.backward - w.handed) / w.all if w.all else 0.0 for w in works) if whole else 0.0
        last = min(last, M - 1e-9)
        low, high = 0.0, (M + 1) * busy[-1] / min(speeds) + before[-1]
        for _ in range(50):
            middle = (low + high) / 2
            at = 0
            for speed in speeds:
                most = busy[at] + speed * min(middle / M, max(0.0, middle - before[at]) / (M - last))
                at = max(at, bisect_right(busy, most) - 1)
            low, high = (low, middle) if at >= len(works) else (middle, high)
        return low


def _recomputed(items: Sequence[tuple[float, float]], room: float) -> float:
    """The least recompute so that the sizes of all others are within the room; layers may be recomputed in part.
    `items`: the recompute and the size of each layer.
    """
    return math.inf if room < 0 else _least_with(items, sum(size for _, size in items) - room)


def _least_with(items: Iterable[tuple[float, float]], load: float) -> float:
    """What layers of so much work have of something at the least; the last of them in part. `items`: both of each."""
    found = 0.0
    for size, work in sorted(items, key=lambda pair: pair[0] / pair[1] if pair[1] else math.inf):
        if load <= 0 or not work:
            break
        found += size * min(1.0, load / work)
        load -= work
    return found


_MOST_ODD = 6  # layers that are unlike most others


def packed(works: Sequence[float], num_devices: int) -> float:
    """What the busiest of so many devices has at the least, whichever layers each has; 0 where layers are too unlike to
    tell quickly.
    """
    each, group = alike(works)
    odd = sorted(work for work, like in zip(works, group, strict=True) if not like)
    count = sum(group)
    if len(odd) > _MOST_ODD or not each or num_devices == 1:
        return 0.0
    shared = [[sum(part) for part in parts] for parts in _set_partitions(odd) if len(parts) <= num_devices]

    def fits(bound: float) -> bool:
        for loads in shared:
            if max(loads, default=0.0) > bound:
                continue
            room = sum(int((bound - load) / each + ROUNDING) for load in loads)
            if room + (num_devices - len(loads)) * int(bound / each + ROUNDING) >= count:
                return True
        return False

    sums = {load for loads in shared for load in loads} | {0.0}
    bounds = sorted({load + number * each for load in sums for number in range(count + 1)})
    return bounds[bisect_left(bounds, True, key=fits)] * (1 - ROUNDING)


def _set_partitions(items: Sequence[float]) -> Iterator[list[list[float]]]:
    """Every way to put them together."""
    if not items:
        yield []
        return
    for parts in _set_partitions(items[1:]):
        yield [[items[0]], *parts]
        for number, part in enumerate(parts):
            yield [*parts[:number], [items[0], *part], *parts[number + 1 :]]


class CutBounds:
    """What no plan with given cuts can be below, of one choice: by sums of layers, so that thousands are quick."""

    def __init__(
        self, profile: Profile, placement: Placement, speeds: Sequence[float], microbatches: int, recipe: str
    ) -> None:
        works = layer_works(profile, placement.num_devices > 1)
        entry = entry_work(profile, alone=placement.num_devices == 1)
        self._all = [0.0, *accumulate(work.all for work in works)]
        self._before = [0.0, *accumulate(w.forward + (w.handed if recipe in WHOLE else 0.0) for w in works)]
        self._last = max(work.backward - work.handed for work in works) if recipe in WHOLE else 0.0
        self._entry, self._placement, self._speeds, self._M = entry, placement, speeds, microbatches

    def seconds(self, counts: Sequence[int]) -> float:
        """Of the makespan. What is before a stage counts at the speed of the fastest device."""
        ends = [0, *accumulate(counts)]
        fastest, least = max(self._speeds), 0.0
        for stages, speed in zip(self._placement.stages, self._speeds, strict=True):
            work = sum(self._all[ends[s + 1]] - self._all[ends[s]] + self._entry.all for s in stages) / speed
            head = self._before[ends[stages[0]]] / fastest
            last = max(counts[s] for s in stages) * self._last / speed if self._last else 0.0
            least = max(least, self._M * work, head + self._M * work - last)
        return least * (1 - ROUNDING)
