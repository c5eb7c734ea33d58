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
    placement = schedule.placement
    starts = {
        (action.stage, action.microbatch): start
        for row, times in zip(schedule.rows, timeline.starts, strict=True)
        for action, start in zip(row, times, strict=True)
        if action.kind in BACKWARDS
    }
    hops = costs.hops(placement)
    rows = []
    for device, row in enumerate(schedule.rows):
        fused: list[Action] = []
        for position, action in enumerate(row):
            stage, kind, microbatch = action
            before = fused[-1] if fused else None
            if kind is Kind.WEIGHT_GRAD and before == Action(stage, Kind.INPUT_GRAD, microbatch):
                crosses = stage > 0 and placement.device(stage - 1, microbatch) != device
                hop = hops[stage] if crosses else 0
                if stage == 0 or starts[stage - 1, microbatch] >= timeline.ends[device][position] + hop:
                    fused[-1] = Action(stage, Kind.BACKWARD, microbatch)
                    continue
            fused.append(action)
        rows.append(fused)
    made = schedule.with_rows(rows)
    return made if simulate(made, costs).makespan <= timeline.makespan else schedule
