"""The problem that `optimal` solves, in exact numbers: which actions there are, what comes first, what is allowed.

Every backward may run as its halves, or whole where that costs less than they do. Where it does not, the halves do
whatever it does, and sooner.

Times stay fractions here. Whole numbers are the solver's business, and simulated ones with rounding errors would make
a proof of nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

from gapless.errors import ScheduleError
from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.dependencies import completes, dependencies
from gapless.schedule.memory import peaks
from gapless.schedule.placement import Placement
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Objective, Timeline

_F, _B, _I, _W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD


def fraction(number: Any) -> Any:
    """The number as it is written: 0.03 is three hundredths, not the nearest sum of powers of two."""
    if number is None or isinstance(number, tuple):
        return number and tuple(map(fraction, number))
    return Fraction(repr(float(number))) if isinstance(number, float) else Fraction(number)


def exact(costs: Costs) -> Costs:
    """All costs as fractions."""
    values: dict[str, Any] = {name: fraction(value) for name, value in vars(costs).items()}
    return replace(costs, **values)


@dataclass(frozen=True)
class ExactProblem:
    """What is asked, in exact numbers."""

    placement: Placement
    num_microbatches: int
    costs: Costs
    limit: Fraction | None
    objective: Objective

    @cached_property
    def naive(self) -> Schedule:
        """One microbatch after the other in halves: always possible if anything is, and the list of all actions."""
        rows: list[list[Action]] = [[] for _ in range(self.placement.num_devices)]
        stages = range(self.placement.num_stages)
        for m in range(self.num_microbatches):
            for kind, order in ((_F, stages), (_I, stages[::-1]), (_W, stages[::-1])):
                for stage in order:
                    rows[self.placement.device(stage, m)].append(Action(stage, kind, m))
        return Schedule(tuple(map(tuple, rows)), self.placement, "naive")

    @cached_property
    def durations(self) -> dict[Kind, tuple[Fraction, ...]]:
        return cast(dict[Kind, tuple[Fraction, ...]], self.costs.durations(self.placement))

    @cached_property
    def hops(self) -> tuple[Fraction, ...]:
        """What the way to (or back from) each stage takes, if it is on another device than the stage before."""
        return tuple(Fraction(hop) for hop in self.costs.hops(self.placement))

    def duration(self, action: Action) -> Fraction:
        return self.durations[action.kind][action.stage]

    def is_cheaper_whole(self, stage: int) -> bool:
        """Whether a backward of this stage takes less than its halves."""
        inputs, weights, whole = (self.durations[kind][stage] for kind in (_I, _W, _B))
        return whole < inputs + weights

    def work(self, stage: int) -> Fraction:
        """The least that a microbatch takes there."""
        times = {kind: self.durations[kind][stage] for kind in (_F, _I, _W, _B)}
        return times[_F] + min(times[_I] + times[_W], times[_B])

    def device(self, action: Action) -> int:
        return self.placement.device(action.stage, action.microbatch)

    def hop(self, before: Action, after: Action) -> Fraction:
        """The least time from the end of an action to the start of one that needs it."""
        return self.hops[max(before.stage, after.stage)] if self.device(before) != self.device(after) else Fraction(0)

    def edges(self) -> Iterator[tuple[Action, Action]]:
        """What an action needs, and of one kind, stage and device the microbatch before."""
        for action in self.naive.actions:
            yield from ((need, action) for need in dependencies(action, self.naive))
        for row in self.naive.rows:
            for key in dict.fromkeys((action.stage, action.kind) for action in row):
                yield from pairwise(action for action in row if action[:2] == key)

    @cached_property
    def fixed(self) -> dict[Action, Fraction]:
        """First actions of devices whose start no order can change: those that need only each other."""
        starts: dict[Action, Fraction] = {}
        devices: set[int] = set()
        start = Fraction(0)
        for stage, device in enumerate(self.placement.single or ()):
            first, following = Action(stage, _F, 0), Action(stage + 1, _F, 0)
            if device in devices:
                break
            devices.add(device)
            starts[first] = start
            start += self.duration(first)
            start += self.hop(first, following) if stage + 1 < self.placement.num_stages else 0
        return starts

    @cached_property
    def least(self) -> Fraction:
        """A bound without a search: the work of a device, for the makespan after the earliest start there."""
        heads = [Fraction(0)]
        for stage in range(1, self.placement.num_stages):
            hops = [self.hop(Action(stage - 1, _F, m), Action(stage, _F, m)) for m in range(self.num_microbatches)]
            heads.append(heads[-1] + self.durations[_F][stage - 1] + min(hops))
        found = Fraction(0)
        for row in self.naive.rows:
            head = min((heads[action.stage] for action in row), default=Fraction(0))
            work = sum((self.work(action.stage) for action in row if action.kind is _F), Fraction(0))
            found = max(found, work + head if self.objective == "makespan" else work)
        return found

    def timeline(self, schedule: Schedule) -> Timeline:
        return simulate(schedule, self.costs)

    def value(self, timeline: Timeline) -> Fraction:
        return Fraction(getattr(timeline, self.objective))

    @cached_property
    def smallest(self) -> tuple[Fraction, int]:
        """The smallest limit that anything fits, and the device that needs it: there one microbatch takes as much."""
        held = peaks(self.naive, self.costs)
        return Fraction(max(held)), held.index(max(held))

    @property
    def is_possible(self) -> bool:
        return self.limit is None or self.smallest[0] <= self.limit

    def accepted(self, schedule: Schedule | None) -> Timeline | None:
        """The schedule simulated, if it has just these actions in microbatch order and stays within the limit. Its
        whole backwards are split where they cost no less.
        """
        if schedule is None or schedule.num_devices != self.placement.num_devices:
            return None
        for row, wanted in zip(schedule.rows, self.naive.rows, strict=True):
            halves = [half for action in row for half in completes(action)]
            by_chain = sorted(halves, key=lambda action: action[:2])  # a stable sort: leaves each chain in its order
            if by_chain != sorted(wanted, key=lambda action: action[:2]):
                return None
        rows = [[each for action in row for each in self._quickest(action)] for row in schedule.rows]
        made = Schedule(tuple(map(tuple, rows)), self.placement)
        if self.limit is not None and max(peaks(made, self.costs)) > self.limit:
            return None
        try:
            return self.timeline(made)
        except ScheduleError:
            return None

    def _quickest(self, action: Action) -> tuple[Action, ...]:
        return (action,) if self.is_cheaper_whole(action.stage) else completes(action)
