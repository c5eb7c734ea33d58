"""Programs that run the stages of a model, each made once."""

from collections.abc import Mapping

from gapless.pipeline.options import Options
from gapless.run.program import Program
from gapless.run.world import World
from gapless.schedule.action import Schedule
from gapless.schedule.lower import add_verdicts, forward_only
from gapless.stage.stage import Stage


class Programs:
    """By the number of microbatches and what they are for."""

    def __init__(self, world: World, schedule: Schedule, options: Options) -> None:
        self._world, self._schedule, self._options = world, schedule, options
        self._made: dict[tuple[int, bool, bool, int], Program] = {}

    def clear(self) -> None:
        """There are other stages now."""
        self._made.clear()

    def of(
        self, stages: Mapping[int, Stage], microbatches: int, *, inference: bool, recorded: bool, turn: int
    ) -> Program:
        """`turn`: above 0 where steps overlap, so that two are under way; each has its own program."""
        key = (microbatches, inference, recorded, turn)
        if key not in self._made:
            options, schedule = self._options, self._schedule
            if microbatches != options.microbatches:
                schedule = options.schedules.made(microbatches)
            if inference:
                schedule = forward_only(schedule)
            if turn:
                schedule = add_verdicts(schedule)
            costs = options.schedules.costs
            self._made[key] = self._world.program(schedule, stages, options.told_loss, costs, recorded=recorded)
        return self._made[key]
