"""Steps that follow each other without waiting for the optimizer's check."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, compress, pairwise

from gapless.errors import ConfigError
from gapless.schedule.action import PER_MINIBATCH, Action, Kind, Schedule
from gapless.schedule.asynchronous.verdicts import warm_ups
from gapless.schedule.costs import Number
from gapless.schedule.timeline import Timeline


def add_verdicts(schedule: Schedule, minibatch: int = 0) -> Schedule:
    """A `V` for each device, behind the forwards that it may run before: a step that is to follow another one."""
    rows = []
    for device, (row, count) in enumerate(zip(schedule.rows, warm_ups(schedule), strict=True)):
        verdict = [Action(min(schedule.placement.stages[device]), Kind.VERDICT, minibatch)] if row else []
        rows.append([*row[:count], *verdict, *row[count:]])
    return schedule.with_rows(rows)


def end_with_updates(schedule: Schedule) -> Schedule:
    """A `U` for each stage, at the end of its device's row."""
    updates = [[Action(stage, Kind.UPDATE, 0) for stage in stages] for stages in schedule.placement.stages]
    return schedule.with_rows([[*row, *more] for row, more in zip(schedule.rows, updates, strict=True)])


def consecutive(schedule: Schedule, steps: int) -> Schedule:
    """So many steps of a schedule: microbatches count on, and each device goes to the next step when it is done. With
    one step, the schedule as it is.
    """
    return schedule if steps == 1 else _one_after_another([end_with_updates(add_verdicts(schedule))] * steps)


def join_steps(timelines: Sequence[Timeline]) -> Timeline:
    """Consecutive steps of `pipe.training`, measured in one process, as one timeline with consecutive microbatches."""
    if not timelines:
        raise ConfigError("there is no timeline to join: give those of some steps")
    for before, after in pairwise(timelines):
        meet = zip(before.ends, after.starts, strict=False)
        same = before.schedule == after.schedule and before.clock == after.clock is not None
        if not same or any(one and other and one[-1] > other[0] for one, other in meet):
            raise ConfigError(
                "these timelines are not of consecutive steps on one clock: join those of training.step in one "
                "process, in their order and with no other call of the pipeline between them"
            )
    kept = [[a.kind is not Kind.VERDICT for a in row] for row in timelines[0].schedule.rows]

    def joined(times: Callable[[Timeline], Sequence[Sequence[Number]]]) -> tuple[tuple[Number, ...], ...]:
        first, *others = map(times, timelines)
        rows = [list(compress(row, keep)) for row, keep in zip(first, kept, strict=True)]
        return tuple(tuple(chain(row, *(each[n] for each in others))) for n, row in enumerate(rows))

    schedule = _one_after_another([each.schedule for each in timelines])
    starts, ends = joined(lambda each: each.starts), joined(lambda each: each.ends)
    return replace(timelines[0], schedule=schedule, starts=starts, ends=ends)


def _one_after_another(steps: Sequence[Schedule]) -> Schedule:
    """The first one has no verdict on anything."""
    rows = [list[Action]() for _ in steps[0].rows]
    for step, schedule in enumerate(steps):
        count = schedule.num_microbatches
        for device, row in enumerate(schedule.rows):
            rows[device] += [
                Action(stage, kind, step if kind in PER_MINIBATCH else number + step * count)
                for stage, kind, number in row
                if step or kind is not Kind.VERDICT
            ]
    return Schedule.of(rows, name=steps[0].name)
