"""A traced model between two edits: its traces, the pieces they were cut into, and what they have fixed."""

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gapless.model.fidelity.batch_questions import BatchQuestion
from gapless.model.model_edits import Makeup
from gapless.model.own_loss import Counting

from .piece import Piece
from .settled import check_remembered
from .shared_trace import Shared, find_shared
from .trace import Trace

Found = tuple[int, list[BatchQuestion]]  # the number of a trace, and for which answers it was found
_MOST_SHARED = 4  # sizes of one kind of batch that are looked at one by one


class Edition:
    """`pieces` has a list for each stage, with a piece for each trace."""

    def __init__(self, model: nn.Module, pieces: list[list[Piece]]) -> None:
        self._model = model
        self.pieces = pieces
        self.traces: list[tuple[tuple[Any, ...], Trace]] = []
        # The traces that fit a kind of microbatch, and what it is asked that depends on its data.
        self.known: dict[Any, list[Found]] = {}
        self._num_shared: Counter[Any] = Counter()  # sizes of each kind that use a trace made for others
        self.names: list[str] = []  # what each stage has, once there is a trace
        self.countings: dict[int, Counting] = {}  # by the number of a trace
        self._makeup = self._taken()

    def _taken(self) -> Makeup:
        """With the attributes that forwards were seen to read: parameters, buffers and parts are looked up in another
        way; what is left are the numbers, flags, lists and settings that a forward decides by: the rate of a dropout, a
        scale, a config; an instance has them, or its class.
        """
        model = [self._model]  # a function that holds us would keep us until Python's collector comes
        reads: dict[nn.Module, list[str]] = {}
        for path, name in {each for _, trace in self.traces for each in trace.read_first}:
            reads.setdefault(self._model.get_submodule(path), []).append(name)
        return Makeup(lambda: model, reads)

    def modes(self) -> tuple[bool, ...]:
        """Which modules are in training."""
        return tuple([module.training for module in self._makeup.modules])

    def parts(self) -> set[Any]:
        """The modules and parameters that the model has."""
        return self._makeup.parts()

    def holds(self) -> bool:
        """Whether the model is as it was."""
        if self._makeup.same():
            return True
        if not self.traces:
            self._makeup = self._taken()  # nothing was built on it
            return True
        return False

    def shared(
        self, modes: tuple[Any, ...], flat: list[Any], spec: pytree.TreeSpec, device: torch.device
    ) -> Shared | None:
        """A trace in another mode, or for other sizes, that does the same for this batch. A trace of its own holds for
        more sizes than those of one batch, so it is worth its time where there are many. `device`: that of the traces.
        """
        traces = [trace for _, trace in self.traces]
        kind = (modes, spec, tuple(leaf.dim() if isinstance(leaf, Tensor) else leaf for leaf in flat))
        if self._num_shared[kind] >= _MOST_SHARED:
            return None
        found = find_shared(self._model, flat, spec, device, traces)
        if found is not None:
            self._num_shared[kind] += 1
            traces[found.number].read_first |= found.read_first
            check_remembered(self._model, traces)
        return found

    def add(self, modes: tuple[Any, ...], trace: Trace) -> None:
        """One more trace."""
        self.traces.append((modes, trace))
        self._makeup = self._taken()

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Around a trace: Python's collector rests, since it would look again and again at all that a trace makes. What
        the forward itself has changed on its way is no edit.
        """
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()
            self._makeup = self._taken()
