"""What a plan takes on account of the device that has the last layer, where devices have several stages each.

Before the first backward that device has little to run, and where memory is short it waits. In a vee it has the first
layers too, so what it runs are those, A, and the last ones, Z. What A leaves behind stays until the first microbatch
has come all the way back:

    0: AF AF AF AF .  .  .  .  ZF ZI ZW ZF ZI ZW .  .  AI AW ...
       |------ all F ------------|
       |------ all F and I but those of A -----------|

In a loop it has to wait for the stages before its first one; and where weight gradients do not wait, these have their
I behind its last backward. Everything else of the model is on the other devices, and layers can't be cut: if this
device has few of them, another has many. Of all ways to share them out the quickest is the bound.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from gapless.plan.profile.machine import Mesh
from gapless.plan.profile.profile import Profile
from gapless.plan.search.bounds.least_work import ROUNDING, LeastWork, Limits, alike
from gapless.plan.search.bounds.warm_up import Fill
from gapless.schedule.placement import Placement, line, loop, vee


class EndDevices:
    """The bounds of all choices on one profile whose devices are equally fast."""

    def __init__(self, profile: Profile, works: Sequence[LeastWork], fills: Sequence[Fill], entry: LeastWork) -> None:
        self._profile, self._works, self._fills, self._entry = profile, works, fills, entry
        self._each, group = alike([work.all for work in works])
        self._number = [0, *accumulate(group)]  # of the layers that are alike, up to each position
        self._all = _sums(work.all for work in works)
        self._forward = _sums(work.forward for work in works)
        self._handed = _sums(work.handed for work in works)
        self._again = _sums(fill.again for fill in fills)
        self._gained = _sums(max(0.0, fill.forward - fill.again) for fill in fills)
        self._held = _sums(fill.size for fill in fills)
        self._gradients = _sums(layer.gradients for layer in profile.layers)

    def vee(self, mesh: Mesh, M: int, speed: float, room: Limits | None) -> float:
        """Of two stages on each device: device 0 has the layers before a and those from b on."""
        K, L, profile, entry = mesh.num_devices, len(self._works), self._profile, self._entry
        down, hops = self._down(vee(K), mesh, speed), self._hops(vee(K), mesh, 2 * K - 1)
        kept = self._kept(room)
        best = math.inf
        for a in range(1, L - 2 * K + 2):
            for b in range(L - 1, a + 2 * K - 3, -1):
                load = M * (self._all[a] + self._all[L] - self._all[b] + 2 * entry.all) / speed
                if load >= best:
                    break
                others = M * (self._others(a, b, K - 1) + 2 * entry.all) / speed
                if others >= best:
                    continue
                back = down + (self._handed[L] - self._handed[a]) / speed + hops
                # Either everything is recomputed, since Z lies between a forward of A and its backward; or it is kept.
                busy = load + self._idle(a, b, M, speed, down, back)
                if room is not None:
                    left = room.each[0] - profile.reserved - kept[a] - (kept[L] - kept[b])
                    if left < 0:
                        continue
                    ahead = self._ahead(a, M, left / (1 + room.slack))
                    pace = M * (back + self._handed[a] / speed) / ahead if ahead else math.inf
                    kept_all = max(pace, load + self._idle(a, b, ahead, speed, down, back))
                    busy = min(kept_all, busy + M * self._again[a] / speed)
                sizes = self._gradients[a], self._gradients[L] - self._gradients[b]
                best = min(best, max(others, busy + mesh.sum_seconds(profile, 0, min(sizes))))
        return best if best < math.inf else 0.0  # nothing fits: whoever tries it says why

    def line(self, mesh: Mesh, M: int, speed: float, room: Limits) -> float:
        """Of one stage on each device: what the layers before a leave behind, on device 0, is there until the
        microbatch comes back.
        """
        K, L, entry = mesh.num_devices, len(self._works), self._entry
        placement = line(K)
        back = self._down(placement, mesh, speed) + self._handed[L] / speed + self._hops(placement, mesh, K - 1)
        kept = self._kept(room)
        best = math.inf
        for a in range(1, L - K + 2):
            load = M * (self._all[a] + entry.all) / speed
            if load >= best:
                break
            others = M * (self._others(a, L, K - 1) + entry.all) / speed
            left = room.each[0] - self._profile.reserved - kept[a]
            if others < best and left >= 0:
                ahead = self._ahead(a, M, left / (1 + room.slack))
                pace = M * back / ahead if ahead else math.inf
                # Or it is recomputed, but where a backward is the next action behind its forward: the device waits.
                waits = back - (self._forward[a] + entry.forward + self._handed[a]) / speed
                again = M * max(0.0, min(self._again[a] / speed, waits))
                best = min(best, max(others, min(max(load, pace), load + again)))
        return best if best < math.inf else 0.0

    def _ahead(self, a: int, M: int, room: float) -> int:
        """Microbatches of which the layers before a can be held."""
        return min(M, int(room / self._held[a] + ROUNDING)) if self._held[a] else M

    def _idle(self, a: int, b: int, ahead: int, speed: float, down: float, back: float) -> float:
        """Of device 0 of a vee, which runs so many forwards of A before the first microbatch comes back to it. `down`:
        when it has gone all the way down.
        """
        L, entry = len(self._works), self._entry
        front = ahead * (self._forward[a] + entry.forward)
        early = front + self._forward[L] - self._forward[b] + entry.forward
        later = front + ahead * (self._all[L] - self._all[b] + entry.all)
        return max(0.0, down - early / speed, back - later / speed)

    def loop(self, mesh: Mesh, v: int, M: int, speed: float, room: Limits | None) -> float:
        """Of v stages on each device, whose weight gradients do not wait. The last device has the layers from b on,
        and of those before it what the others have no place for: j of those that are alike on each of them.
        """
        K, L, profile, entry = mesh.num_devices, len(self._works), self._profile, self._entry
        placement = loop(K, v)
        first_backward = self._down(placement, mesh, speed)
        before = self._hops(placement, mesh, K - 1)
        wait = (self._forward[K - 1] + (K - 1) * entry.forward) / speed + before
        drain = (sum(w.handed for w in self._works[: K - 1]) + (K - 1) * entry.handed) / speed + before
        drain += mesh.sum_seconds(profile, 0, self._gradients[1])
        sums = mesh.sum_seconds(profile, K - 1, min(layer.gradients for layer in profile.layers))
        # The last weight gradient holds nobody up; of a layer it is at most so much of its work.
        share = max((w.backward - w.handed) / w.all if w.all else 0.0 for w in self._works)
        kept = self._kept(room)
        least_kept = min(after - size for size, after in pairwise(kept))
        best = math.inf
        for b in range(L - 1, v * K - 2, -1):
            between = range(K - 1, b)
            least = min(self._works[number].all for number in between)
            quickest = self._quickest(between)
            own = M * (self._all[L] - self._all[b] + v * entry.all)
            if own / speed >= best:
                break
            for j in range(math.ceil(self._number[b] / (K - 1)) + 1):
                others = M * (j * self._each + v * entry.all) / speed
                if others >= best:
                    break
                more = max(0, self._number[b] - (K - 1) * j)
                extra = max(more * self._each, (v - 1) * least)
                idle = wait
                if room is not None:
                    left = room.each[K - 1] - profile.reserved - (kept[L] - kept[b]) - max(v - 1, more) * least_kept
                    if left < 0:
                        continue
                    busy = left / (1 + room.slack) * quickest + M * (self._gained[b] - self._gained[K - 1])
                    busy += self._forward[L] - self._forward[b] + entry.forward
                    idle = max(idle, first_backward - busy / speed)
                end = (own + M * extra) / speed + idle
                best = min(best, max(others, end + sums, end - share * extra / speed + drain))
        return best if best < math.inf else 0.0  # nothing fits: whoever tries it says why

    def _down(self, placement: Placement, mesh: Mesh, speed: float) -> float:
        """When the first microbatch is through all forwards."""
        forward = self._forward[-1] + placement.num_stages * self._entry.forward
        return forward / speed + self._hops(placement, mesh, placement.num_stages - 1)

    def _hops(self, placement: Placement, mesh: Mesh, last: int) -> float:
        """What it takes to get from the first stage to this one, between devices, at the least."""
        size = min((layer.boundary for layer in self._profile.layers[:-1]), default=0)
        homes, found = placement.homes, 0.0
        for stage in placement.crossed:
            if stage <= last:
                link = mesh.hop(self._profile, homes[stage - 1], homes[stage])
                found += link.latency + link.seconds(size)
        return found

    def _others(self, a: int, b: int, devices: int) -> float:
        """What the busiest of so many devices with the layers between has at the least."""
        fullest = math.ceil((self._number[b] - self._number[a]) / devices)
        return max((self._all[b] - self._all[a]) / devices, fullest * self._each)

    def _kept(self, room: Limits | None) -> list[float]:
        return _sums(layer.kept(room.shards if room is not None else 1) for layer in self._profile.layers)

    def _quickest(self, numbers: Sequence[int]) -> float:
        """Seconds of forwards for each byte that they leave behind, at the most."""
        entry = self._entry.forward
        pairs = [(self._fills[number].forward + entry, self._fills[number].size) for number in numbers]
        return max(seconds / size if size else math.inf if seconds else 0.0 for seconds, size in pairs)


def _sums(values: Iterable[float]) -> list[float]:
    return [0.0, *accumulate(values)]
