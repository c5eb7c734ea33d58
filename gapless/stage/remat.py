"""Remat: keep a cell's inputs instead of its graph, and run its layers again when the backward needs them.

    remat    kept per microbatch            rebuilt
    none     inputs and the whole graph     nothing
    stage    inputs                         the whole graph, by `recompute` or at the start of the backward
    layer    inputs of every layer          one layer's graph at a time, inside the backward, the last layer first

The layers are seeded and cast as in the first run, so the second computes the same bits. With a split backward it
happens once: the graph is rebuilt for the first half, and the second uses what that recorded. (Buffers that a forward
changes, like the running statistics of batch norm, are changed by both runs; `Work.replaying` tells them apart.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gapless.errors import ConfigError, GaplessError

from . import microbatch as mb
from .autocast import AutocastState, autocast_is_on
from .calls import Calls
from .cell import Cell, Kept, Work, leaf_of


class RematCell(Cell):
    """A cell that keeps its inputs alone."""

    def __init__(self, calls: Calls, layers: range, parameters: Sequence[nn.Parameter], *, with_loss: bool) -> None:
        super().__init__(calls, layers, with_loss=with_loss)
        self._parameters = parameters
        # Which outputs need a gradient, for each pattern of inputs and parameters that do: a run without a graph cannot
        # tell.
        self._flags: dict[tuple[bool, ...], list[bool]] = {}
        self._needs_graph = False  # a layer uses autograd in its forward: it asks for gradients, or sets hooks

    def forward(self, work: Work, inputs: Any) -> Any:
        tensors, shape = mb.flatten(inputs)
        kept = Kept([leaf_of(tensor) for tensor in tensors], shape, autocast=AutocastState())
        pattern = tuple(tensor.requires_grad for tensor in (*kept.leaves, *self._parameters))
        flags = self._flags.get(pattern)
        handed = None if flags is None or self._needs_graph else self._run_without_graph(work, kept, flags)
        if handed is None:
            handed, self._flags[pattern] = self._learn(work, kept)
        self._kept[work.microbatch] = kept
        return handed

    def recompute(self, work: Work) -> None:
        kept = self._kept[work.microbatch]
        if kept.edges is not None:
            return
        assert kept.autocast is not None
        work.replaying = True
        with torch.enable_grad(), kept.autocast.replayed():
            self._build(work, kept)
        work.replaying = False

    def backward(self, work: Work, grads: list[Tensor | None]) -> list[Tensor | None]:
        self.recompute(work)
        return super().backward(work, grads)

    def _learn(self, work: Work, kept: Kept) -> tuple[Any, list[bool]]:
        """The outputs and which of them need a gradient, from a run with a graph, on a copy: layers may change their
        input.
        """
        leaves = [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in kept.leaves]
        versions = [leaf._version for leaf in leaves]
        handed = self._build(work, Kept(leaves, kept.shape), defer=False)
        if versions != [leaf._version for leaf in leaves]:
            self._guarded = True
        return handed, [tensor.requires_grad for tensor in mb.flatten(handed)[0]]

    def _run_without_graph(self, work: Work, kept: Kept, flags: list[bool]) -> Any:
        """The outputs, marked by `flags`; None if they must be computed with a graph."""
        clear_casts()
        versions = [leaf._version for leaf in kept.leaves]
        with torch.no_grad():
            tensors = [leaf.detach().clone() if self._guarded else leaf.detach() for leaf in kept.leaves]
            try:
                handed = self._attempt(work, kept, tensors)
            except RuntimeError:
                self._needs_graph = True  # if it was another error, it will come again
                return None
        clear_casts()
        kept.edges = kept.start = None
        if versions != [leaf._version for leaf in kept.leaves]:
            raise GaplessError(
                "a layer changed its input in place, and remat needs that input again: "
                "use remat='none' for its stage, or let it make a new tensor."
            )
        if self._with_loss:
            return handed
        outputs = mb.flatten(handed)[0]
        if len(outputs) != len(flags):
            return None
        for output, flag in zip(outputs, flags, strict=True):
            if flag:
                output.requires_grad_()
        return handed


def cells_of(layers: Sequence[Callable[..., Any]], calls: Calls, *, remat: str, with_loss: bool) -> list[Cell]:
    """The cells of a stage. Layers that share a parameter, and those between them, are one cell: autograd adds up the
    contributions to a parameter within one backward before it accumulates them."""
    if remat == "none":
        return [Cell(calls, range(len(layers)), with_loss=with_loss)]
    if remat not in ("stage", "layer"):
        raise ConfigError(f"remat={remat!r}: it is 'none', 'stage' or 'layer'.")
    bounds = _bounds(layers) if remat == "layer" else [0, len(layers)]
    return [
        RematCell(
            calls, range(start, end), parameters_of(layers[start:end]), with_loss=with_loss and end == len(layers)
        )
        for start, end in itertools.pairwise(bounds)
    ]


def clear_casts() -> None:
    """Autocast keeps the casts it made; those made without a graph must not be used where one is built, nor the
    reverse.
    """
    if autocast_is_on():
        torch.clear_autocast_cache()


def parameters_of(layers: Sequence[Callable[..., Any]]) -> list[nn.Parameter]:
    """The parameters of those layers that are modules, each once."""
    return list(
        dict.fromkeys(parameter for layer in layers if isinstance(layer, nn.Module) for parameter in layer.parameters())
    )


def _bounds(layers: Sequence[Callable[..., Any]]) -> list[int]:
    """Where a cell may end: not between two uses of one parameter."""
    last: dict[int, int] = {}
    for number, layer in enumerate(layers):
        for parameter in parameters_of([layer]):
            last[id(parameter)] = number
    bounds, end = [0], 0
    for number, layer in enumerate(layers):
        end = max([end, number, *(last[id(parameter)] for parameter in parameters_of([layer]))])
        if end == number:
            bounds.append(number + 1)
    return bounds
