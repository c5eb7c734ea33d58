"""The optimizer's step as actions, for a schedule that leaves it to others; and steps that follow each other without
waiting for its check.
"""

from collections import defaultdict

from gapless.schedule.action import PER_MINIBATCH, Action, Kind, Schedule
from gapless.schedule.asynchronous.updates import WEIGHT_GRADIENTS
from gapless.schedule.asynchronous.verdicts import warm_ups


def add_updates(schedule: Schedule) -> Schedule:
    """A `U` for each stage right after its last weight gradient, unless the schedule has its own.

    Where a stage is on several devices the update waits for all of them. It is at the end of the row that has the last
    microbatch, so that nothing else waits there.
    """
    if Kind.UPDATE in schedule.kinds:
        return schedule
    rows = []
    for device, row in enumerate(schedule.rows):
        last = {action.stage: i for i, action in enumerate(row) if action.kind in WEIGHT_GRADIENTS}
        due: dict[int, list[Action]] = defaultdict(list)
        for stage, position in last.items():
            cycle = schedule.placement.cycles[stage]
            if len(set(cycle)) == 1:
                due[position].append(Action(stage, Kind.UPDATE, 0))
            elif schedule.placement.device(stage, schedule.num_microbatches - 1) == device:
                due[len(row) - 1].append(Action(stage, Kind.UPDATE, 0))
        rows.append([a for i, action in enumerate(row) for a in (action, *due.get(i, ()))])
    return schedule.with_rows(rows)


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
