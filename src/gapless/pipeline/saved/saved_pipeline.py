"""A pipeline with the optimizer and the scheduler of its user, as checkpoints have it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from gapless.checkpoint.contents import Contents
from gapless.checkpoint.saveable import Opened, Saveable
from gapless.pipeline.saved.saved_model import SavedModel
from gapless.pipeline.saved.saved_optimizer import SavedOptimizer, scheduler_tree, taking_scheduler
from gapless.run.world import Gathering


class Counts(Protocol):
    """What knows how many steps it has done, and can be told."""

    steps: int


class SavedPipeline(Saveable):
    """`nothing` stands for the parameters of a rank that has none."""

    def __init__(self, model: SavedModel, pipe: Counts, nothing: nn.Parameter) -> None:
        self._model, self._pipe, self._nothing = model, pipe, nothing

    @property
    def steps(self) -> int:
        return self._pipe.steps

    def gathered(self, doing: str) -> AbstractContextManager[Gathering]:
        return self._model.world.gathered(doing)

    def contents(self, gathering: Gathering, *, optimizer: Any, scheduler: Any, extra: Any) -> Contents:
        made = self._model.contents("pipeline", self.steps, gathering)
        if optimizer is not None:
            made.add("optim", SavedOptimizer(self._model, optimizer, self._nothing).tree())
        made.add("scheduler", scheduler_tree(scheduler))
        (made.add if self._model.world.one_process else made.add_same)("extra", extra)
        return made

    def taking(self, opened: Opened, gathering: Gathering, *, optimizer: Any, scheduler: Any) -> Callable[[], Any]:
        places = [self._model.taking(opened, "pipeline", gathering)]
        if optimizer is not None:  # without one the model alone is wanted
            places.append(SavedOptimizer(self._model, optimizer, self._nothing).taking(opened))
            places.append(taking_scheduler(opened, scheduler))
        extra = opened.value("extra")

        def put_in_place() -> Any:
            for each in places:
                each()
            self._pipe.steps = opened.manifest.step
            return extra

        return put_in_place
