"""What is left of a schedule where nothing is trained."""

from gapless.schedule.action import Kind, Schedule


def forward_only(schedule: Schedule) -> Schedule:
    """For inference: the forwards in their order."""
    return schedule.with_rows([action for action in row if action.kind is Kind.FORWARD] for row in schedule.rows)
