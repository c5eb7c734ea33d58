"""What has one autograd graph and is rebuilt at once: all layers of a stage or, with remat="layer", one of them.

A cell keeps for each microbatch its inputs, as leaves whose `.grad` the backward fills, and the gradient edges of its outputs. It
does not keep the outputs: what was handed on must be free to die.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..errors import GaplessError
from . import microbatch as mb
from .autocast import AutocastState, without_autocast
from .deferred import Records
from .intercept import Interception, Restart
from .plain import apply_first

_IN_PLACE_ON_LEAF = "leaf Variable that requires grad"


@dataclasses.dataclass(slots=True)
class Work:
    """One microbatch on its way through a stage."""

    microbatch: int
    step: int
    target: Any
    weight: float | Tensor
    want_outputs: bool
    records: Records


@dataclasses.dataclass(slots=True)
class Kept:
    """What a cell keeps of a microbatch. `edges` are those of the outputs, or of the weighted loss; None: to be recomputed."""

    leaves: list[Tensor]
    shape: mb.Shape | None
    edges: list[GradientEdge | None] | None = None
    start: Tensor | None = None  # the gradient of the weighted loss: one
    autocast: AutocastState | None = None


class Cell:
    """Some consecutive layers with one graph per microbatch."""

    def __init__(
        self,
        layers: Sequence[Callable[..., Any]],
        first_layer: int,
        intercept: Interception,
        *,
        loss: Callable[[Any, Any], Tensor] | None = None,
        spread: bool = False,
    ) -> None:
        self._layers = list(layers)
        self._first_layer = first_layer
        self._intercept = intercept
        self._loss = loss
        self._spread = spread
        self._kept: dict[int, Kept] = {}
        # True once a layer was seen to change the cell's input in place, which torch forbids on a leaf.
        self._guarded = False

    def forward(self, work: Work, inputs: Any) -> Any:
        """Runs the layers, keeps the graph, returns the outputs cut off from it."""
        tensors, shape = mb.flatten(inputs)
        kept = Kept([_leaf(tensor) for tensor in tensors], shape)
        handed = self._build(work, kept)
        self._kept[work.microbatch] = kept
        return handed

    def recompute(self, work: Work) -> None:
        """Nothing to do: this cell keeps its graph."""

    def backward(self, work: Work, grads: list[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs from those of the outputs. Weight gradients are added to `.grad` or recorded."""
        kept = self._kept.pop(work.microbatch)
        edges, starts = self._starts(kept, grads)
        if edges:
            with without_autocast(), self._intercept.backward(work.records, edges):
                torch.autograd.backward(edges, starts)
        return [leaf.grad for leaf in kept.leaves]

    def apply(self, inputs: Any) -> Any:
        """The layers alone."""
        value = inputs
        for number, layer in enumerate(self._layers):
            value = apply_first(layer, value) if self._spread and number == 0 else layer(value)
        return value

    def drop(self, microbatch: int) -> None:
        """Forgets a microbatch."""
        self._kept.pop(microbatch, None)

    def _starts(self, kept: Kept, grads: list[Tensor | None]) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where the backward starts, and with what."""
        assert kept.edges is not None
        if self._loss is not None:
            edge, start = kept.edges[0], kept.start
            return ([edge], [start]) if edge is not None and start is not None else ([], [])
        if len(grads) != len(kept.edges):
            raise GaplessError(f"{len(grads)} gradients came for {len(kept.edges)} outputs: give one, or None, for each tensor of the outputs.")
        pairs = [(edge, grad) for edge, grad in zip(kept.edges, grads, strict=True) if edge is not None and grad is not None]
        return [edge for edge, _ in pairs], [grad for _, grad in pairs]

    def _build(self, work: Work, kept: Kept) -> Any:
        """Runs the layers on the leaves and notes the edges. Starts again where what was learnt on the way changes the beginning."""
        while True:
            identity = self._guarded or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
            tensors = [_not_a_leaf(leaf) for leaf in kept.leaves] if identity else kept.leaves
            try:
                return self._run(work, kept, mb.unflatten(tensors, kept.shape), defer=True)
            except Restart:
                continue
            except RuntimeError as error:
                if self._guarded or _IN_PLACE_ON_LEAF not in str(error):
                    raise
                self._guarded = True

    def _run(self, work: Work, kept: Kept, value: Any, *, defer: bool) -> Any:
        intercept = self._intercept
        with intercept.forward(work.records if defer else None, work.step, work.microbatch):
            for number, layer in enumerate(self._layers):
                intercept.layer = self._first_layer + number
                value = apply_first(layer, value) if self._spread and number == 0 else layer(value)
            if self._loss is None:
                return self._hand_on(kept, value)
            loss = self._loss(value, work.target)
            _check_scalar(loss)
            weighted = loss * work.weight
        kept.edges = [get_gradient_edge(weighted) if weighted.requires_grad else None]
        kept.start = torch.ones_like(weighted)
        return self._outputs(value) if work.want_outputs else None, loss.detach()

    def _hand_on(self, kept: Kept, value: Any) -> Any:
        tensors, shape = mb.flatten(value)
        kept.edges = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in tensors]
        return mb.unflatten([_leaf(tensor) for tensor in tensors], shape)

    def _outputs(self, value: Any) -> Any:
        tensors, shape = mb.flatten(value)
        return mb.unflatten([tensor.detach() for tensor in tensors], shape)


def _leaf(tensor: Tensor) -> Tensor:
    """The same data without its history, marked if a gradient for it is wanted."""
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor.detach()


def _not_a_leaf(leaf: Tensor) -> Tensor:
    """The leaf's data as the result of an operation, which it is in the plain loop.

    It matters in two places: torch forbids to change a leaf in place, and autocast caches the cast of a leaf but not that of a
    result, so that gradients of several uses would be summed in another precision.
    """
    return torch.ops.aten._unsafe_view.default(leaf, leaf.shape) if leaf.requires_grad else leaf  # type: ignore[no-any-return]


def _check_scalar(loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise GaplessError(f"the loss must return a scalar tensor, and returned a {type(loss).__name__}.")
    if loss.dim() != 0:
        raise GaplessError(f"the loss must be a scalar, and has the shape {tuple(loss.shape)}: reduce it, with mean() for example.")
