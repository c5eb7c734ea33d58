"""Microbatches that are made alike share their CUDA graphs, as long as nothing else changes."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from . import microbatch as mb
from .draws import UncapturableError
from .places import GraphedMicrobatch
from .trial import Trial
from .unchanged import Unchanged

_WARM_UP = 3
_MOST = 8
_MOST_CHANGES = 3


class ForwardCall(NamedTuple):
    """The arguments of a forward."""

    inputs: Any
    target: Any
    weight: float | Tensor
    want_outputs: bool
    defer: bool
    keep: bool
    step: int
    place: int


class Likeness:
    """Microbatches that are made alike."""

    def __init__(self) -> None:
        self.steps, self.last = 0, -1  # in how many it was seen, and in which of them last
        self.light: GraphedMicrobatch | None = None  # forwards that are recomputed: they keep nothing
        self.slots: dict[int, GraphedMicrobatch] = {}
        self.trial: Trial | None = None


class Likenesses:
    """Of one stage, until there is a `reason` for it to run eagerly."""

    def __init__(self, parts: Sequence[Any], why_not: Callable[[], str | None], number: Callable[[], int]) -> None:
        self._parts, self._why_not, self._number = parts, why_not, number
        self.reason: str | None = None
        self._known: dict[Any, Likeness] = {}
        self._seen: Unchanged | None = None
        self._changes, self._failures, self._step = 0, 0, -1

    @property
    def captured(self) -> bool:
        """Whether there are graphs."""
        return any(like.steps > _WARM_UP for like in self._known.values())

    def of(self, asked: ForwardCall) -> Likeness | None:
        """That of a microbatch that can be replayed; None: it runs eagerly."""
        if self.reason is not None or (type(asked.weight) is float and not asked.weight):
            return None
        weight = _made(asked.weight) if isinstance(asked.weight, Tensor) else None
        key = (_made(asked.inputs), _made(asked.target), weight, asked.want_outputs, asked.defer, asked.keep)
        like = self._known.get(key)
        if like is None:
            if len(self._known) == _MOST:
                self.give_up(f"its inputs come in more than {_MOST} shapes")
                return None
            like = self._known[key] = Likeness()
        if like.last != asked.step:
            like.steps, like.last = like.steps + 1, asked.step
        return like if like.steps > _WARM_UP else None

    def begin(self, step: int) -> bool:
        """Before a forward; whether there are to be no graphs from now on but new ones."""
        if step == self._step or self.reason is not None:
            return False
        self._step = step
        if (reason := self._why_not()) is not None:
            self.give_up(reason)
            return True
        now = Unchanged(self._parts)
        if now == self._seen:
            return False
        self._changes += self.captured
        if self._changes > _MOST_CHANGES:
            self.give_up("what its layers are made of changes from step to step")
        self._known.clear()
        self._seen = now
        return True

    def failed(self, error: Exception) -> None:
        """A capture did. Torch says so with a RuntimeError; anything else may be the layers' own, and come again."""
        self._failures += 1
        if isinstance(error, UncapturableError | RuntimeError) or self._failures > _MOST_CHANGES:
            self.give_up(str(error).partition("\n")[0] or type(error).__name__)

    def give_up(self, reason: str, *, quietly: bool = False) -> None:
        """From now on everything runs eagerly."""
        self.reason = reason
        self._known.clear()
        if not quietly:
            warnings.warn(f"stage {self._number()} runs without CUDA graphs: {reason}", stacklevel=2)


def _made(tree: Any) -> Any:
    """What graphs depend on of a tree: how its tensors are made, and what else is in it."""
    tensors, shape = mb.flatten(tree)
    made = tuple([(each.shape, each.stride(), each.dtype, each.requires_grad) for each in tensors])
    return made if shape is None else (made, shape.spec, tuple(shape.leaves), tuple(shape.again))
