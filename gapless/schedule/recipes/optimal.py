"""The best schedule there is, with the proof: `auto`'s question, answered exactly for small K and M.

A greedy search gives a schedule and leaves open how far it is from the best. Here the question goes to OR-tools' CP-SAT as
whole numbers: a start per action, one action at a time per device, and for every activation an interval from the start of its F
to the end of its W, of which a device may hold no more than the limit at any time:

    device 0   0F0 0F1 ... 0I0 0W0        activation of 0F0  |<------ from 0F0 to 0W0 ------>|

What comes back is a schedule, what it takes by our own simulator, and a bound that no schedule can be below. Where both are the
same the schedule is proven best; when the time is up first, the gap between them says how much may be left.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, cast

from gapless.errors import ConfigError, ScheduleError
from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.costs import Costs, Number
from gapless.schedule.dependencies import completes, dependencies
from gapless.schedule.memory import peaks
from gapless.schedule.placement import Placement
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline

Objective = Literal["makespan", "span"]

_F, _I, _W = Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD
_MOST_TICKS = 2**31  # of a whole schedule: finer costs are rounded down to this grid, for which the bound makes up
_SAME = 1e-6  # a gap below this is rounding


@dataclass(frozen=True)
class Progress:
    """How far the search is: the best value found, and what no schedule can be below."""

    seconds: float
    value: Number
    bound: Number


@dataclass(frozen=True)
class Optimum:
    """A schedule, what it takes (`value`), and what no schedule can be below (`bound`)."""

    schedule: Schedule
    value: Number
    bound: Number
    seconds: float

    @property
    def gap(self) -> float:
        return float((self.value - self.bound) / self.value) if self.value else 0.0

    @property
    def proven(self) -> bool:
        """No schedule is better, but for the rounding of costs too fine for whole numbers."""
        return self.gap < _SAME


def optimal(
    placement: Placement,
    num_microbatches: int,
    costs: Costs | None = None,
    *,
    memory_limit: Number | None = None,
    objective: Objective = "makespan",
    hint: Schedule | None = None,
    time_limit: float = 60.0,
    seed: int = 0,
    num_workers: int = 8,
    progress: Callable[[Progress], None] | None = None,
) -> Optimum:
    """The schedule with the least makespan (or span) under `memory_limit`, which is in the unit of the costs' `activation`.

    `hint` is a schedule to start from, and the result is never worse; one that breaks the order of microbatches or the limit is
    passed over. `progress` is called in the caller's thread. The same seed finds the same value whenever the search gets to its
    end, though perhaps another schedule of that value: several workers race, more of them than cores on purpose, because they
    are different methods and one of them has the proof. Ctrl-C stops the search within a moment.

    Recomputes and updates are left out, and so is the queue at a link where the costs have a bandwidth: the bound stays true,
    but may then be out of reach.
    """
    began = time.monotonic()
    solver_module = _solver_module()
    _check(num_microbatches, memory_limit, objective, time_limit)
    costs = costs or Costs()
    asked = _Question(placement, num_microbatches, _exact(costs), _fraction(memory_limit), objective)
    asked.refuse_tight_limit()
    best = asked.accepted(hint) or asked.timeline(asked.naive)
    bound = asked.least
    if asked.value(best) > bound:
        model = _Model(solver_module, asked, best, hinted=hint is not None)
        search = _Search(solver_module, model, began, time_limit, seed, num_workers)
        bound = max(bound, search.run(asked.value(best), bound, progress))
        found = asked.accepted(search.schedule)
        if found is not None and asked.value(found) < asked.value(best):
            best = found
    schedule = best.schedule.renamed("optimal")
    value: Number = getattr(simulate(schedule, costs), objective)
    shown = value if bound >= asked.value(best) else min(value, _plain(bound))
    return Optimum(schedule, value, shown, time.monotonic() - began)


def _solver_module() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ConfigError("`optimal` needs OR-tools, which is not installed: pip install gapless[optimal]") from None
    return cp_model


def _check(num_microbatches: int, memory_limit: Number | None, objective: str, time_limit: float) -> None:
    if num_microbatches < 1:
        raise ConfigError(f"{num_microbatches} microbatches: a schedule needs at least 1")
    if memory_limit is not None and not (math.isfinite(memory_limit) and memory_limit >= 0):
        raise ConfigError(f"the memory limit is {memory_limit!r}, but it is a number of at least 0; leave it out for none")
    if objective not in ("makespan", "span"):
        raise ConfigError(f"the objective is {objective!r}, but it is makespan or span")
    if not time_limit > 0:
        raise ConfigError(f"the time limit is {time_limit!r} seconds, but it takes more than 0")


def _fraction(number: Number | None) -> Any:
    """The number as it is written: 0.03 is three hundredths, not the nearest sum of powers of two."""
    return None if number is None else Fraction(repr(float(number))) if isinstance(number, float) else Fraction(number)


def _exact(costs: Costs) -> Costs:
    values = {field.name: getattr(costs, field.name) for field in fields(costs)}
    return replace(
        costs, **{n: tuple(map(_fraction, v)) if isinstance(v, tuple) else _fraction(v) for n, v in values.items()}
    )


def _plain(number: Fraction) -> Number:
    return int(number) if number.denominator == 1 else float(number)


def _common(numbers: list[Fraction]) -> Fraction:
    """The largest unit of which all the numbers are whole multiples."""
    bottom = math.lcm(*(number.denominator for number in numbers))
    return Fraction(math.gcd(*(int(number * bottom) for number in numbers)) or 1, bottom)


@dataclass(frozen=True)
class _Question:
    """What is asked, in exact numbers."""

    placement: Placement
    num_microbatches: int
    costs: Costs
    limit: Fraction | None
    objective: Objective

    @cached_property
    def naive(self) -> Schedule:
        """One microbatch after the other: always possible if anything is, and the list of all actions."""
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
    def transit(self) -> tuple[Fraction, ...]:
        sizes = self.costs.per_stage("boundary", self.placement)
        return tuple(Fraction(size / self.costs.bandwidth) if self.costs.bandwidth else Fraction(0) for size in sizes)

    def duration(self, action: Action) -> Fraction:
        return self.durations[action.kind][action.stage]

    def device(self, action: Action) -> int:
        return self.placement.device(action.stage, action.microbatch)

    def lag(self, before: Action, after: Action) -> Fraction:
        """The least time from the start of an action to the start of one that needs it."""
        if self.device(before) == self.device(after):
            return self.duration(before)
        hop = cast(Fraction, self.costs.latency) + self.transit[max(before.stage, after.stage)]
        return self.duration(before) + hop

    def chains(self) -> Iterator[tuple[Action, ...]]:
        """The actions of one kind, stage and device, which run in microbatch order."""
        for row in self.naive.rows:
            for key in dict.fromkeys((action.stage, action.kind) for action in row):
                yield tuple(action for action in row if action[:2] == key)

    def edges(self) -> Iterator[tuple[Action, Action]]:
        for row in self.naive.rows:
            for action in row:
                yield from ((need, action) for need in dependencies(action, self.naive))
        for chain in self.chains():
            yield from pairwise(chain)

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
            start += self.lag(first, following) if stage + 1 < self.placement.num_stages else 0
        return starts

    @cached_property
    def least(self) -> Fraction:
        """The work of a device, for the makespan after the earliest start of anything on it: a bound without any search."""
        heads = [Fraction(0)]
        for stage in range(1, self.placement.num_stages):
            lags = [self.lag(Action(stage - 1, _F, m), Action(stage, _F, m)) for m in range(self.num_microbatches)]
            heads.append(heads[-1] + min(lags))
        found = Fraction(0)
        for row in self.naive.rows:
            head = min((heads[action.stage] for action in row), default=Fraction(0))
            found = max(found, sum(map(self.duration, row), head if self.objective == "makespan" else Fraction(0)))
        return found

    def timeline(self, schedule: Schedule) -> Timeline:
        return simulate(schedule, self.costs)

    def value(self, timeline: Timeline) -> Fraction:
        return Fraction(getattr(timeline, self.objective))

    def refuse_tight_limit(self) -> None:
        held = peaks(self.naive, self.costs)
        if self.limit is not None and max(held) > self.limit:
            fullest = held.index(max(held))
            raise ScheduleError(
                f"no schedule fits a memory limit of {_plain(self.limit)}: one microbatch alone takes "
                f"{_plain(Fraction(max(held)))} on device {fullest}, so that is the smallest limit"
            )

    def accepted(self, schedule: Schedule | None) -> Timeline | None:
        """The schedule simulated, if it has just these actions in microbatch order and stays within the limit."""
        if schedule is None or schedule.num_devices != self.placement.num_devices:
            return None
        rows = tuple(tuple(gift for action in row for gift in completes(action)) for row in schedule.rows)
        for row, wanted in zip(rows, self.naive.rows, strict=True):
            by_chain = sorted(row, key=lambda action: action[:2])  # a stable sort: leaves each chain in its order
            if by_chain != sorted(wanted, key=lambda action: action[:2]):
                return None
        made = Schedule(rows, self.placement)
        if self.limit is not None and max(peaks(made, self.costs)) > self.limit:
            return None
        try:
            return self.timeline(made)
        except ScheduleError:
            return None
