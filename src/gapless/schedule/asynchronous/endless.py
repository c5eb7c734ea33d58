"""A schedule without end, as a value: what comes first, what then comes again and again, and what is left at the end.

    0: 0F0 0F1 | 0F2 0B0 0U0 | 0B0 0U0 0B1 0U1      pipedream on three devices: from one period to the next all
    1: 1F0 1F1 1B0 1U0 | 1F2 1B1 1U1 | 1B1 1U1      numbers grow by one, and those of the end by as many as there were
    2: 2F0 2B0 2U0 2F1 2B1 2U1 | 2F2 2B2 2U2 |      periods

However many minibatches come, they are run by a schedule that has an end (`unrolled`); one that is cut short leaves out
what belongs to those that never came.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

from gapless.errors import ScheduleError
from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.asynchronous.weights import other_versions
from gapless.schedule.placement import Placement, line, replicated
from gapless.schedule.verify import Report, verify

Rows = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class Endless:
    """For each device the actions before the first period, those of the first period, and those after a period that is
    the last. `ahead` minibatches begin before the first period, `minibatches` in each one, of `microbatches` each.
    """

    prologue: Rows
    period: Rows
    epilogue: Rows
    ahead: int
    minibatches: int
    microbatches: int
    placement: Placement
    name: str

    def unrolled(self, minibatches: int) -> Schedule:
        """For so many of them."""
        if minibatches < 1:
            raise ScheduleError(f"{minibatches} minibatches make no schedule: give at least 1")
        periods = max(0, -(-(minibatches - self.ahead) // self.minibatches))
        rows = []
        for first, again, last in zip(self.prologue, self.period, self.epilogue, strict=True):
            row = [*first, *(self._later(a, n) for n in range(periods) for a in again)]
            row += [self._later(action, periods) for action in last]
            rows.append(tuple(action for action in row if self._minibatch(action) < minibatches))
        return Schedule(tuple(rows), self.placement, self.name)

    def verified(self) -> dict[int, Report]:
        """For 1 to 3K minibatches, of K devices: the shortest streams, and those that reach the steady state. Where a
        minibatch is one microbatch, every forward finds the version that PipeDream's formula gives it.
        """
        return {count: self._verified(self.unrolled(count)) for count in range(1, 3 * len(self.period) + 1)}

    def _verified(self, schedule: Schedule) -> Report:
        report = verify(schedule)
        if self.microbatches > 1:  # always one behind, which `verify` knows
            return report
        replicas = [len(cycle) for cycle in self.placement.cycles]
        found = other_versions(schedule, replicas, forwards_ahead(replicas))
        return replace(report, violations=(*report.violations, *found))

    def text(self) -> str:
        """A line per device, its three parts apart."""
        rows = zip(self.prologue, self.period, self.epilogue, strict=True)
        lines = [" | ".join(" ".join(map(str, part)) for part in row) for row in rows]
        return "\n".join(f"{device}: {each}".rstrip() for device, each in enumerate(lines))

    def _later(self, action: Action, periods: int) -> Action:
        stage, kind, number = action
        each = self.minibatches * (1 if kind is Kind.UPDATE else self.microbatches)
        return Action(stage, kind, number + periods * each)

    def _minibatch(self, action: Action) -> int:
        return action.microbatch if action.kind is Kind.UPDATE else action.microbatch // self.microbatches


def forwards_ahead(replicas: Sequence[int]) -> list[int]:
    """How many forwards a replica of each stage runs before its first backward: of the minibatches that the devices
    after it, and its own other replicas, have under way, its share.
    """
    return [(sum(replicas[stage:]) - 1) // count for stage, count in enumerate(replicas)]


def flow(name: str, replicas: Sequence[int], microbatches: int = 1) -> Endless:
    """Every device is some forwards ahead, as many as its stage's replicas need to hear of the first gradient, and then
    runs one forward and one backward; an update follows the last backward of each minibatch of `microbatches`. Replicas
    take minibatches of one in turn.
    """
    devices = sum(replicas)
    if min(replicas, default=0) < 1:
        raise ScheduleError(f"replicas are {list(replicas)}, but every stage needs at least 1: give a number per stage")
    if microbatches < 1:
        raise ScheduleError(f"a minibatch of {microbatches} microbatches has no update: give at least 1")
    if microbatches > 1 and devices > len(replicas):
        raise ScheduleError(
            f"replicas take minibatches of 1 microbatch, but these have {microbatches}: give 1, or 1 replica per stage"
        )
    if 1 < microbatches < devices:
        raise ScheduleError(
            f"minibatches of {microbatches} microbatches are shorter than the pipeline of {devices} devices: give as "
            "many or more, or 1"
        )
    minibatches = lcm(*replicas)
    warm_ups = forwards_ahead(replicas)
    first_backward = max(warm_up * count for warm_up, count in zip(warm_ups, replicas, strict=True))
    ahead = minibatches * -(-first_backward // (minibatches * microbatches))
    prologue, period, epilogue = [], [], []
    for stage, (count, warm_up) in enumerate(zip(replicas, warm_ups, strict=True)):
        for replica in range(count):
            first, again = ahead * microbatches // count, minibatches * microbatches // count
            numbers = [replica + count * own for own in range(first + again + warm_up)]
            backwards = [_backward(stage, number, microbatches) for number in numbers]
            row = [Action(stage, Kind.FORWARD, number) for number in numbers[:warm_up]]
            pairs = [
                [Action(stage, Kind.FORWARD, number), *backwards[own]] for own, number in enumerate(numbers[warm_up:])
            ]
            prologue.append((*row, *(action for pair in pairs[: first - warm_up] for action in pair)))
            period.append(tuple(action for pair in pairs[first - warm_up :][:again] for action in pair))
            epilogue.append(tuple(action for each in backwards[first - warm_up : first] for action in each))
    placement = line(devices) if devices == len(replicas) else replicated(replicas)
    return Endless(tuple(prologue), tuple(period), tuple(epilogue), ahead, minibatches, microbatches, placement, name)


def _backward(stage: int, number: int, microbatches: int) -> list[Action]:
    made = [Action(stage, Kind.BACKWARD, number)]
    if number % microbatches == microbatches - 1:
        made.append(Action(stage, Kind.UPDATE, number // microbatches))
    return made
