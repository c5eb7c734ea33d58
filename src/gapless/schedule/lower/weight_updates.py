"""The optimizer's step as actions, for a schedule that leaves it to others."""

from collections import defaultdict

from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.asynchronous.updates import WEIGHT_GRADIENTS


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
