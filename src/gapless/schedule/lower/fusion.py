"""An I and the W right behind it as one B, where nobody waits in between; and a B as its I and its W, where the stage
before gains by getting its gradient earlier.
"""

from collections.abc import Collection

from gapless.schedule.action import BACKWARDS, Action, Kind, Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.dependencies import completes
from gapless.schedule.simulate import simulate


def fuse(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Run an I and the W right behind it as one B where nobody waits for the gradient before the W has ended.

    No start moves: what was waited for is still there in time. One B costs less than an I and a W.
    """
    costs = costs or Costs()
    timeline = simulate(schedule, costs)
    starts = {(a.stage, a.microbatch): start for a, start, _ in timeline.all_spans if a.kind in BACKWARDS}
    hops = costs.hops(schedule.placement)
    rows = []
    for device in range(schedule.num_devices):
        fused: list[Action] = []
        for action, _, end in timeline.spans(device):
            stage, kind, microbatch = action
            pair = kind is Kind.WEIGHT_GRAD and fused and fused[-1] == Action(stage, Kind.INPUT_GRAD, microbatch)
            if pair and (stage == 0 or starts[stage - 1, microbatch] >= end + hops[stage]):
                fused[-1] = Action(stage, Kind.BACKWARD, microbatch)
            else:
                fused.append(action)
        rows.append(fused)
    made = schedule.with_rows(rows)
    return made if simulate(made, costs).makespan <= timeline.makespan else schedule


def with_whole_backwards(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """Every I of these stages as a B, wherever its W was."""

    def whole(action: Action) -> Action:
        stage, kind, microbatch = action
        return Action(stage, Kind.BACKWARD, microbatch) if kind is Kind.INPUT_GRAD and stage in stages else action

    return schedule.with_rows(
        [whole(action) for action in row if not (action.kind is Kind.WEIGHT_GRAD and action.stage in stages)]
        for row in schedule.rows
    )


def split(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Run a B as I W and send in between, where that gains: the stage before need not wait for this one's weights."""
    if Kind.BACKWARD not in schedule.kinds:
        return schedule
    costs = costs or Costs()
    made = fuse(in_halves(schedule), costs)
    before, after = simulate(schedule, costs), simulate(made, costs)
    return made if (after.makespan, after.span) < (before.makespan, before.span) else schedule


def in_halves(schedule: Schedule) -> Schedule:
    """Every B as its I and its W."""
    return schedule.with_rows([half for action in row for half in completes(action)] for row in schedule.rows)
