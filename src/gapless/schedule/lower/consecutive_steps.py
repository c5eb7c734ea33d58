"""Steps that follow each other without waiting for the optimizer's check."""

from gapless.schedule.action import PER_MINIBATCH, Action, Kind, Schedule
from gapless.schedule.asynchronous.verdicts import warm_ups


def add_verdicts(schedule: Schedule, minibatch: int = 0) -> Schedule:
    """A `V` for each device, behind the forwards that it may run before: a step that is to follow another one."""
    rows = []
    for device, (row, count) in enumerate(zip(schedule.rows, warm_ups(schedule), strict=True)):
        verdict = [Action(min(schedule.placement.stages[device]), Kind.VERDICT, minibatch)] if row else []
        rows.append([*row[:count], *verdict, *row[count:]])
    return schedule.with_rows(rows)


def consecutive(schedule: Schedule, steps: int) -> Schedule:
    """So many steps of a schedule: microbatches count on, and each device goes to the next step when it is done. With
    one step, the schedule as it is.
    """
    if steps == 1:
        return schedule
    count, rows = schedule.num_microbatches, [list[Action]() for _ in schedule.rows]
    for step in range(steps):
        for device, row in enumerate(add_verdicts(schedule, step).rows):
            rows[device] += [
                Action(stage, kind, number if kind in PER_MINIBATCH else number + step * count)
                for stage, kind, number in row
                if step or kind is not Kind.VERDICT
            ]
            rows[device] += [Action(stage, Kind.UPDATE, step) for stage in schedule.placement.stages[device]]
    return Schedule.of(rows, name=schedule.name)
