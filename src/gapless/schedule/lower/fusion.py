"""An I and the W right behind it as one B, where nobody waits in between."""

from gapless.schedule.action import BACKWARDS, Action, Kind, Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.simulate import simulate


def fuse(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Run an I and the W right behind it as one B where nobody waits for the gradient before the W has ended.

    No start moves: what was waited for is still there in time. One B costs less than an I and a W.
    """
    costs = costs or Costs()
    timeline = simulate(schedule, costs)
    starts = {
        (action.stage, action.microbatch): start
        for row, times in zip(schedule.rows, timeline.starts, strict=True)
        for action, start in zip(row, times, strict=True)
        if action.kind in BACKWARDS
    }
    hops = costs.hops(schedule.placement)
    rows = []
    for row, ends in zip(schedule.rows, timeline.ends, strict=True):
        fused: list[Action] = []
        for action, end in zip(row, ends, strict=True):
            stage, kind, microbatch = action
            pair = kind is Kind.WEIGHT_GRAD and fused and fused[-1] == Action(stage, Kind.INPUT_GRAD, microbatch)
            if pair and (stage == 0 or starts[stage - 1, microbatch] >= end + hops[stage]):
                fused[-1] = Action(stage, Kind.BACKWARD, microbatch)
            else:
                fused.append(action)
        rows.append(fused)
    made = schedule.with_rows(rows)
    return made if simulate(made, costs).makespan <= timeline.makespan else schedule
