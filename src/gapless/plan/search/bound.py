"""What no plan of a choice can be below, however the model is cut, ordered and recomputed.

The bounds come from the actions alone, never from a plan that was found. A backward takes at least the quicker of a
whole B and an I with a W, since lowering may split and fuse; no recompute is counted. With x the time of a stage for
one microbatch, of which a share is passed on before its weight gradient:

    every device is busy all the time                M sum(x) / devices
    the slowest stage or hop of the best cuts        M max(x)
    one microbatch goes down and back up             sum(F) + sum(I)
    a line of stages fills, and drains               F of the stages before, M x, and then I of the stages before

The last holds for each stage s of a line. Cuts that make later stages smaller lessen it, and the best that any cuts can
do is a geometric row: with `a` the share of x that stages before must do first (and after), x(s+1) = (1 - a/M) x(s),
and the step takes a sum(x) / (1 - (1 - a/M)^K). Where weight gradients may wait, only F counts in `a`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from gapless.plan.cut.chain import Chain, solve
from gapless.plan.profile.contention import ALONE
from gapless.plan.profile.machine import Mesh
from gapless.plan.profile.profile import Profile
from gapless.schedule.action import Kind
from gapless.schedule.costs import Costs
from gapless.schedule.placement import Placement

_ROUNDING = 1e-9  # sums of floats vary with their order
WHOLE = frozenset({"naive", "gpipe", "1f1b", "eager-1f1b", "interleaved", "looped-bfs"})
"""Recipes whose weight gradients never wait: each follows its input gradient, or is one with it."""


@dataclass(frozen=True)
class _Work:
    """Of a layer for one microbatch at speed 1, at the least: F, until its gradient is handed on, and the backward."""

    forward: float
    handed: float
    backward: float

    @property
    def all(self) -> float:
        return self.forward + self.backward


class Bounds:
    """The bounds of choices on one profile of so many samples."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._works = cache(self._work)
        self._slowest = cache(self._slowest_stage)

    def seconds(
        self, recipe: str, stages_per_device: int, mesh: Mesh, microbatches: int, speeds: Sequence[float]
    ) -> float:
        """Of a step, the sum of gradients and the update included."""
        K, M, fastest = mesh.num_devices, microbatches, max(speeds)
        profile, works = self.profile, self._works(K > 1)
        entry = _entry(profile, alone=K == 1)
        total = sum(work.all for work in works) + K * stages_per_device * entry.all
        gradients = sum(layer.gradients for layer in profile.layers)
        update = sum(layer.update.median for layer in profile.layers) / sum(speeds)
        if K == 1:
            return (M * total / fastest + mesh.sum_seconds(profile, 0, gradients) + update) * (1 - _ROUNDING)
        least = M * total / sum(speeds)
        once = sum(work.forward + work.handed for work in works) / fastest
        found = max(least, once, M * (max(work.all for work in works) + entry.all) / fastest)
        if stages_per_device == 1:
            found = max(found, M * self._slowest(tuple(speeds)), self._filled(works, M, K, recipe) / fastest)
            found = max(found, self._with_sums(mesh, M * total, gradients, speeds))
        return (found + update) * (1 - _ROUNDING)

    def _with_sums(self, mesh: Mesh, busy: float, gradients: float, speeds: Sequence[float]) -> float:
        """In a line a device sums the gradients of its stage when all its work is done."""
        if mesh.replicas == 1:
            return 0.0
        sums = min(mesh.sum_seconds(self.profile, position, gradients) for position in range(mesh.num_devices))
        return (busy + min(speeds) * sums) / sum(speeds)

    def _filled(self, works: Sequence[_Work], M: int, K: int, recipe: str) -> float:
        """A line that fills and drains, at its best cuts. Entry times are left out."""
        if recipe in WHOLE:
            ahead = min((work.forward + work.handed) / work.all if work.all else 1.0 for work in works)
            # The last weight gradient of a stage holds nobody up.
            M_ = M - max((work.backward - work.handed) / work.all if work.all else 0.0 for work in works)
        else:
            ahead, M_ = min(work.forward / work.all if work.all else 1.0 for work in works), float(M)
        total = sum(work.all for work in works)
        if ahead <= 0 or M_ <= 0:
            return 0.0
        return ahead * total / (1 - max(0.0, 1 - ahead / M_) ** K)

    def _work(self, together: bool) -> tuple[_Work, ...]:
        """`together`: devices run beside each other."""
        slower = self.profile.contention if together else ALONE
        found = []
        for layer in self.profile.layers:
            whole = slower.backward * layer.whole_backward
            inputs, weights = slower.halves * layer.input_grad.median, slower.halves * layer.weight_grad.median
            found.append(_Work(slower.forward * layer.forward.median, min(whole, inputs), min(whole, inputs + weights)))
        return tuple(found)

    def _slowest_stage(self, speeds: tuple[float, ...]) -> float:
        """The slowest stage of a line at the best cuts."""
        works = self._works(True)
        if len(works) < len(speeds):
            return 0.0
        rows = {speed: [0.0] for speed in set(speeds)}
        for speed, sums in rows.items():
            for work in works:
                sums.append(sums[-1] + work.all / speed)
        found = solve(Chain([rows[speed] for speed in speeds], [None] * len(speeds), [None] * len(speeds)))
        return 0.0 if found is None else float(found.slowest)


def _entry(profile: Profile, *, alone: bool) -> _Work:
    slower = ALONE if alone else profile.contention
    backward = min(slower.backward, slower.halves) * profile.entry.backward
    return _Work(slower.forward * profile.entry.forward, backward, backward)


def cut_seconds(costs: Costs, placement: Placement, microbatches: int, recipe: str) -> float:
    """The makespan that no order of the actions of these stages is below.

    device 0   |-- F down to r --|                             |-- I up from r --|
    device r                     |-- all its work but a last W --|W|
    """
    times = costs.durations(placement)
    forward, inputs = ([float(time) for time in times[kind]] for kind in (Kind.FORWARD, Kind.INPUT_GRAD))
    weights, whole = ([float(time) for time in times[kind]] for kind in (Kind.WEIGHT_GRAD, Kind.BACKWARD))
    hops = [float(hop) for hop in costs.hops(placement)]
    least = 0.0
    for stages in placement.stages:
        first = stages[0]
        work = microbatches * sum(forward[s] + min(whole[s], inputs[s] + weights[s]) for s in stages)
        head = sum(forward[:first]) + sum(hops[: first + 1])
        least = max(least, head + work)
        if recipe in WHOLE:
            tail = sum(min(i, b) for i, b in zip(inputs[:first], whole[:first], strict=True)) + sum(hops[: first + 1])
            last = max(max(0.0, min(whole[s], inputs[s] + weights[s]) - min(inputs[s], whole[s])) for s in stages)
            least = max(least, head + work - last + tail)
    return least * (1 - _ROUNDING)
