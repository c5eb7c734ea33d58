"""What people do between steps, and what would go wrong unseen while the steps of `pipe.training` are under way."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from gapless.errors import ConfigError, GaplessError
from gapless.run.clip import OwnPart


def refuse(*_: Any, **__: Any) -> NoReturn:
    """In place of what the training does itself."""
    raise ConfigError(
        "the optimizer is stepped by pipe.training: leave out optimizer.step() and zero_grad(), or close the training"
    )


def refuse_clipping() -> GaplessError:
    """A norm of gradients that are on their way, or gone."""
    return ConfigError("pipe.training clips the gradients itself: give it max_norm=, or close the training")


class TrainingHabits:
    """Of one training: what its optimizer, parameters and scheduler must not meet. `used` is told of each use of a
    module; `settle_here` ends what is under way, for a call that may be one rank's alone.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scheduler: Any,
        used: Callable[[nn.Module], None],
        settle_here: Callable[[], None],
    ) -> None:
        self._optimizer, self._scheduler, self.used = optimizer, scheduler, used
        self._counts: list[Any] = []  # of the scheduler after the last step; empty if not known
        self._parameters = self._given()
        self._trained = [each.requires_grad for each in self._parameters]
        self._unclipped: OwnPart | None = OwnPart(self._parameters, refuse_clipping)
        self._kind, self._is_stepping = type(scheduler), False
        if scheduler is not None:
            scheduler.__class__ = self._read_settled(settle_here)
        optimizer.zero_grad = refuse  # type: ignore[method-assign]
        for name in _USES if not _open else ():
            setattr(nn.Module, name, _settling(name))
        _open.add(self)

    def end(self) -> None:
        """The optimizer is its owner's again."""
        self._unclipped = None
        if self._scheduler is not None:
            self._scheduler.__class__ = self._kind
        vars(self._optimizer).pop("zero_grad", None)
        _open.discard(self)
        for name in _USES if not _open else ():
            setattr(nn.Module, name, _USES[name])

    def loaded(self) -> None:
        """The optimizer was, and the scheduler may be."""
        self._counts = []

    def check(self, *, under_way: bool) -> None:
        """Before a step; others may be `under_way`."""
        now = self._given()
        if [*map(id, now)] != [*map(id, self._parameters)]:
            raise ConfigError("the optimizer has other parameters than before: close the training, and make a new one")
        trained = [each.requires_grad for each in now]
        if trained != self._trained and under_way:
            raise ConfigError(
                "a parameter was frozen or unfrozen while a step was under way: call training.settle() first"
            )
        self._trained = trained
        if self._counts and self._counted() == [count + 1 for count in self._counts]:
            raise ConfigError("the scheduler is stepped by pipe.training: leave out scheduler.step()")

    def step_scheduler(self) -> None:
        """After an update."""
        self._is_stepping = True
        self._scheduler.step()
        self._is_stepping = False
        self._counts = self._counted()

    def _read_settled(self, settle: Callable[[], None]) -> type:
        """The scheduler's class: while a step is under way its rates and its state are those of the step before."""

        def first(name: str) -> Callable[..., Any]:
            def read(scheduler: Any, *args: Any) -> Any:
                if not self._is_stepping:
                    settle()
                return getattr(self._kind, name)(scheduler, *args)

            return read

        names = [name for name in ("get_last_lr", "state_dict") if hasattr(self._kind, name)]
        made = {name: first(name) for name in names}
        return type(self._kind.__name__, (self._kind,), {**made, "__module__": self._kind.__module__})

    def _given(self) -> list[nn.Parameter]:
        return [each for group in self._optimizer.param_groups for each in group["params"]]

    def _counted(self) -> list[Any]:
        found = [getattr(self._scheduler, name, None) for name in ("last_epoch", "_step_count")]
        return found if all(isinstance(each, int) for each in found) else []


# What uses tensors or modes of a model; the plain functions of torch.
_NAMES = ("zero_grad", "train", "named_parameters", "state_dict", "load_state_dict")
_USES = {name: getattr(nn.Module, name) for name in _NAMES}
_open: weakref.WeakSet[TrainingHabits] = weakref.WeakSet()


def _settling(name: str) -> Callable[..., Any]:
    @functools.wraps(_USES[name])
    def settled(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for each in list(_open):
            each.used(self)
        return _USES[name](self, *args, **kwargs)

    return settled
