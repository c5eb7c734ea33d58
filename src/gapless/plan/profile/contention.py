"""What devices cost each other where they share one machine: the interpreter's lock, caches, memory.

A forward is one small call after another and needs the lock for each; a backward runs mostly without it. So two
forwards side by side hold each other up far more than a forward and a backward do, and which of them meet depends on
the schedule:

    0: F0 F1    B0 F2 ...        on device 0, F0 has no company, and F1 has a forward beside it
    1:    F0 B0    F1 ...        the other B0 has no company either

Stages are measured alone and beside each other. While others run, an action loses a share of its time, and that share
is found from all that was measured (`fitted`). Where there are more devices than processors, they take turns. The
other way round, what each action of a schedule loses follows from what runs beside it, which follows from how long each
takes: a few rounds of simulation settle that (`in_company`).
"""

import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from gapless.plan.profile.profile import ALONE, Company, Lost
from gapless.schedule.action import Kind, Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.simulate import simulate

_ROUNDS = 4
_TOLD_APART = 0.05  # of all that was beside, as if both kinds had been there alike
_MOST = 0.75  # of its time that an action may lose
_PAUSED = 4.0  # times what it takes alone: the machine stood still
_FAR = (0.1, 4.0)  # from what is explained: of what it takes alone, and times the median distance

_F, _B, _I, _W, _R = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.RECOMPUTE
_NAMES = {_F: "forward", _R: "recompute", _I: "input_grad", _W: "weight_grad", _B: "backward"}


class Span(NamedTuple):
    """From when to when a device ran forward or backward, and what that takes alone."""

    begin: float
    end: float
    forward: bool
    alone: float = 0.0


class Beside(NamedTuple):
    """The seconds of forwards and of backwards that other devices ran meanwhile; those of several add up."""

    forwards: float
    backwards: float


def beside(rows: Sequence[Sequence[Span]]) -> list[list[Beside]]:
    """For every span of every device; those of one device do not overlap."""
    forwards = _Integral(span for row in rows for span in row if span.forward)
    backwards = _Integral(span for row in rows for span in row if not span.forward)
    found = []
    for row in rows:
        mine = []
        for span in row:
            own = span.end - span.begin
            during = [each.until(span.end) - each.until(span.begin) for each in (forwards, backwards)]
            during[0 if span.forward else 1] -= own
            mine.append(Beside(max(0.0, during[0]), max(0.0, during[1])))
        found.append(mine)
    return found


class _Integral:
    """How many device-seconds of these spans were over at any time."""

    def __init__(self, spans: Iterable[Span]) -> None:
        steps: dict[float, int] = defaultdict(int)
        for span in spans:
            steps[span.begin] += 1
            steps[span.end] -= 1
        self._times = sorted(steps)
        self._running = list(accumulate(steps[time] for time in self._times))
        lengths = (
            count * (end - begin)
            for count, begin, end in zip(self._running, self._times, self._times[1:], strict=False)
        )
        self._sums = list(accumulate(lengths, initial=0.0))

    def until(self, time: float) -> float:
        place = bisect_right(self._times, time) - 1
        return self._sums[place] + self._running[place] * (time - self._times[place]) if place >= 0 else 0.0


class _Case(NamedTuple):
    near: Beside
    lost: float
    alone: float

    def unexplained(self, by: Lost) -> float:
        """What is lost but not by these shares, as a share of what it takes alone."""
        return (self.lost - sum(share * seconds for share, seconds in zip(by, self.near, strict=True))) / self.alone


def fitted(rows: Sequence[Sequence[Span]], *, forward: bool) -> Lost:
    """The shares that explain best what forwards, or backwards, took longer than alone."""
    cases = [
        _Case(near, span.end - span.begin - span.alone, span.alone)
        for row, nears in zip(rows, beside(rows), strict=True)
        for span, near in zip(row, nears, strict=True)
        if span.forward is forward and 0 < span.end - span.begin < _PAUSED * span.alone
    ]
    if not cases:
        return Lost()
    found = _least_squares(cases)
    # What lies far off is not the others' doing but the machine's, which had something else to do.
    left = [case.unexplained(found) for case in cases]
    middle = statistics.median(left)
    far = max(_FAR[0], _FAR[1] * statistics.median(abs(each - middle) for each in left))
    return _least_squares([case for case, each in zip(cases, left, strict=True) if abs(each - middle) <= far])


def _least_squares(cases: Sequence[_Case]) -> Lost:
    """Lost seconds = p * forwards + q * backwards, and the longer a span the less exactly. Where p and q can hardly be
    told apart, since devices run in step, they are nearly the same.
    """
    ff, fb, bb = (sum(c.near[i] * c.near[j] / c.alone for c in cases) for i, j in ((0, 0), (0, 1), (1, 1)))
    fl, bl = (sum(c.near[i] * c.lost / c.alone for c in cases) for i in (0, 1))
    everything = ff + 2 * fb + bb
    if not everything:
        return Lost()
    more, same = _TOLD_APART * everything, (fl + bl) / everything
    ff, bb, fl, bl = ff + more, bb + more, fl + more * same, bl + more * same
    area = ff * bb - fb * fb
    p, q = (fl * bb - bl * fb) / area, (bl * ff - fl * fb) / area
    return Lost(min(max(p, 0.0), _MOST), min(max(q, 0.0), _MOST))


def in_company(costs: Costs, schedule: Schedule, company: Company) -> Costs:
    """The costs of the stages while they run this schedule; `costs` are those of each alone."""
    if company == ALONE or schedule.num_devices == 1:
        return costs
    alone = costs.durations(schedule.placement)
    found = costs
    for _ in range(_ROUNDS):
        near = _beside_stages(schedule, found, company.at_once or math.inf)
        changes = {
            name: tuple(float(time) / _kept(company, kind, near[stage]) for stage, time in enumerate(alone[kind]))
            for kind, name in _NAMES.items()
        }
        found = replace(costs, **changes)  # type: ignore[arg-type]
    return found


class _Around(NamedTuple):
    """For each second of a stage's forwards or backwards: what runs beside it, and the share of it that is its turn."""

    near: Beside
    turn: float


def _beside_stages(schedule: Schedule, costs: Costs, at_once: float) -> list[dict[bool, _Around]]:
    """Per stage what is around its forwards (True) and its backwards (False)."""
    timeline = simulate(schedule, costs)
    rows = [
        [Span(float(begin), float(end), action.kind in (_F, _R)) for action, begin, end in timeline.spans(device)]
        for device in range(schedule.num_devices)
    ]
    sums = [{True: [0.0] * 4, False: [0.0] * 4} for _ in range(schedule.num_stages)]
    for actions, spans, nears in zip(schedule.rows, rows, beside(rows), strict=True):
        for action, span, near in zip(actions, spans, nears, strict=True):
            own = span.end - span.begin
            wanting = 1 + sum(near) / own if own else 1.0
            turn = min(1.0, at_once / wanting)
            # While it has its turn, so many fewer are beside it.
            fewer = max(0.0, wanting * turn - 1) / (wanting - 1) if wanting > 1 else 0.0
            mine = sums[action.stage][span.forward]
            for place, seconds in enumerate((*(fewer * each for each in near), turn * own, own)):
                mine[place] += seconds
    return [
        {
            forward: _Around(Beside(f / own, b / own), turn / own) if own else _Around(Beside(0.0, 0.0), 1.0)
            for forward, (f, b, turn, own) in each.items()
        }
        for each in sums
    ]


def _kept(company: Company, kind: Kind, around: Mapping[bool, _Around]) -> float:
    """The share of its time that an action does not lose."""
    forward = kind in (_F, _R)
    lost = company.forward if forward else company.backward if kind is _B else company.halves
    near, turn = around[forward]
    return turn * (1 - min(_MOST, sum(share * seconds for share, seconds in zip(lost, near, strict=True))))
