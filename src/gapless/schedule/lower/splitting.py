"""A B as its I and its W, where the stage before gains by getting its gradient earlier."""

from gapless.schedule.action import Kind, Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.dependencies import completes
from gapless.schedule.lower.fusion import fuse
from gapless.schedule.simulate import simulate


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
