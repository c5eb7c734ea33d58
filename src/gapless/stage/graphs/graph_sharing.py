"""Microbatches that are made alike share their CUDA graphs, as long as nothing else changes."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from gapless.stage.batch import microbatch as mb
from gapless.stage.batch.view_bases import was_view
from gapless.stage.random.draws import UncapturableError

from .cast_places import CastPlaces
from .code_run import CodeRun
from .graph_assumptions import Unchanged
from .graph_memory import GraphedMicrobatch
from .graph_trial import Trial

_WARM_UP = 3
_MOST = 8
_MOST_CHANGES = 3


class ForwardCall(NamedTuple):
    """The arguments of a forward."""

    inputs: Any
    target: Any = None
    weight: float | Tensor = 1.0
    want_outputs: bool = True
    defer: bool = True
    keep: bool = False
    leaves: bool = False
    step: int = 0
    place: int = 0


class Likeness:
    """Microbatches that are made alike."""

    def __init__(self) -> None:
        self.steps, self.last = 0, -1  # in how many it was seen, and in which of them last
        self.light: GraphedMicrobatch | None = None  # forwards that are recomputed: they keep nothing
        self.slots: dict[int, GraphedMicrobatch] = {}
        self.trial: Trial | None = None


class Flight:
    """A microbatch under way whose forward was replayed."""

    def __init__(self, like: Likeness, asked: ForwardCall) -> None:
        self.like, self.asked = like, asked
        self.number = -1
        self.slot: GraphedMicrobatch | None = None  # None: to be recomputed
        self.trial: Trial | None = None

    @property
    def shadow(self) -> int:
        """The number of its eager twin, where it is tried."""
        return -1 - self.asked.place

    def asked_again(self) -> ForwardCall:
        """What it was asked, from the places where it is; another may come there."""
        assert self.slot is not None
        return self.asked._replace(inputs=self.slot.inputs.copied(), target=self.slot.target.copied())


class Likenesses:
    """Of one stage, until there is a `reason` for it to run eagerly."""

    def __init__(self, parts: Sequence[Any], quiet: bool) -> None:
        self.parts, self._quiet = parts, quiet
        self.number = 0  # of the stage
        self.foreign = False  # it was seen to train a parameter that none of its layers has
        self.reason: str | None = None
        self.casts = CastPlaces(())
        self._known: dict[Any, Likeness] = {}
        self._code = CodeRun()
        self._seen: Unchanged | None = None
        self._changes, self._in_a_row, self._failures, self._step = 0, 0, 0, -1

    @property
    def described(self) -> str:
        """Whether there are graphs, for people."""
        if self.reason is not None:
            return f"no graphs: {self.reason}"
        return "graphs" if self._captured else "graphs after a few steps"

    @property
    def settled(self) -> bool:
        """Whether there are graphs, or there will be none."""
        return self.reason is not None or self._captured

    @property
    def _captured(self) -> bool:
        return any(like.steps > _WARM_UP for like in self._known.values())

    def of(self, asked: ForwardCall) -> Likeness | None:
        """That of a microbatch that can be replayed; None: it runs eagerly."""
        if self.reason is not None or (type(asked.weight) is float and not asked.weight):
            return None
        weight = _made(asked.weight) if isinstance(asked.weight, Tensor) else None
        try:
            key = (_made(asked.inputs), _made(asked.target), weight, asked.want_outputs, asked.defer, asked.keep)
            like = self._known.get(key)
        except (TypeError, RuntimeError):  # a set, a sparse tensor
            self.give_up("what is in its inputs can't be compared")
            return None
        if like is None:
            if len(self._known) == _MOST:
                self.give_up(f"its inputs come in more than {_MOST} shapes")
                return None
            like = self._known[key] = Likeness()
        if like.last != asked.step:
            like.steps, like.last = like.steps + 1, asked.step
        tries = like.trial is not None and not like.trial.over  # till it is known, others run eagerly
        return like if like.steps > _WARM_UP and not tries else None

    def begin(self, step: int, why_not: Callable[[], str | None]) -> bool:
        """Before a forward; whether there are to be no graphs from now on but new ones."""
        if step == self._step or self.reason is not None:
            return False
        self._step = step
        if (reason := why_not()) is not None:
            self.give_up(reason)
            return True
        now = Unchanged([*self.parts, self._code])
        if now == self._seen:
            self._in_a_row = 0
            return False
        self._changes += self._captured
        self._in_a_row += 1
        if self._changes > _MOST_CHANGES or self._in_a_row > 2 * _MOST_CHANGES:
            self.give_up("what its layers are made of changes from step to step")
        self._known.clear()
        self._code = CodeRun()
        self._seen = Unchanged([*self.parts, self._code])
        self.casts = CastPlaces(
            [each for part in self.parts if isinstance(part, nn.Module) for each in part.parameters()]
        )
        return True

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Around the Python code that a graph will stand for."""
        known = len(self._code.read)
        with self._code:
            yield
        if self._code.source is not None:
            raise UncapturableError(f"its code uses {self._code.source}, and a graph would repeat what it got")
        if len(self._code.read) > known:
            self._seen = Unchanged([*self.parts, self._code])

    def end(self) -> None:
        """The step is over, or has failed: before the next forward everything is looked at again."""
        self._step = -1
        self.casts.end()

    def failed(self, error: Exception) -> None:
        """A capture did. Torch says so with a RuntimeError; anything else may be the layers' own, and come again."""
        self._failures += 1
        if isinstance(error, UncapturableError | RuntimeError) or self._failures > _MOST_CHANGES:
            self.give_up(str(error).partition("\n")[0] or type(error).__name__)

    def give_up(self, reason: str) -> None:
        """From now on everything runs eagerly."""
        self.reason = reason
        self._known.clear()
        if not self._quiet:
            warnings.warn(f"stage {self.number} runs without CUDA graphs: {reason}", stacklevel=2)


def _made(tree: Any) -> Any:
    """What graphs depend on of a tree: how its tensors are made, and what else is in it."""
    tensors, shape = mb.flatten(tree, views=True)
    made = tuple([(each.shape, each.stride(), each.dtype, each.requires_grad, was_view(each)) for each in tensors])
    if shape is None:
        return made
    return made, shape.spec, tuple(shape.leaves), tuple(shape.again), repr(shape.views)
