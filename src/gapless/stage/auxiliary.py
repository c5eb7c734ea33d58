"""Auxiliary losses: scalars that layers add to the loss of the microbatch they compute, such as an expert router's.

In a plain loop a layer stores such a scalar and the training code adds it to the loss. In a pipeline other microbatches
are under way when the loss is computed, on other devices, so what a layer has stored is another microbatch's. Here it
travels with the activations instead, and its gradient comes back with theirs:

    stage 0   h, a0  -->  stage 1   h, a0 + a1  -->  last stage   (loss(h, target) + (a0 + a1)) * weight
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapless.errors import GaplessError


class WithAux(NamedTuple):
    """What a stage hands on, with the sum of the auxiliary losses so far, and now and then with the names of attributes
    that its layers have set, for processes that have copies of these.
    """

    value: Any
    aux: Tensor | None
    stored: tuple[str, ...] = ()


class _Adding(threading.local):
    add: Callable[[Tensor], Tensor] | None = None


adding = _Adding()


def aux_loss(value: Tensor) -> Tensor:
    """Adds a scalar to the loss of the current microbatch. Call it in the forward of a layer.

    The loss of a microbatch is then `loss(outputs, target) + aux`, where `aux` is the sum of what its layers have
    added, in their order; both have the same weight. Returns the detached scalar, for logging. Outside a step, in
    `evaluate` and in your own loop, it returns the scalar unchanged and does nothing else.
    """
    if not isinstance(value, Tensor) or value.dim() != 0 or not value.is_floating_point():
        what = f"shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise GaplessError(
            f"aux_loss takes a scalar tensor of floats, but it got {what}: reduce it, with mean() for example."
        )
    return value if adding.add is None else adding.add(value)


class Added(list[Tensor]):
    """The auxiliary losses of one forward, in order: those that come while `adding` has it."""

    __slots__ = ()

    def add(self, value: Tensor) -> Tensor:
        """One more; without its history, as the layer gets it."""
        self.append(value)
        return value.detach()

    def to(self, before: Tensor | None) -> Tensor | None:
        """The sum of these and what there was before."""
        for each in self:
            before = each if before is None else before + each
        return before


@contextlib.contextmanager
def collected() -> Iterator[Added]:
    """Those of a forward that runs meanwhile."""
    added = Added()
    before, adding.add = adding.add, added.add
    try:
        yield added
    finally:
        adding.add = before


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """While it holds, this thread traces: the call is kept in the graph."""
    before, adding.add = adding.add, torch.ops.gapless.aux_loss
    try:
        yield
    finally:
        adding.add = before


@torch.library.custom_op("gapless::aux_loss", mutates_args=())
def _aux_loss(value: Tensor) -> Tensor:
    return value.clone()


@_aux_loss.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


torch.fx.node.has_side_effect(torch.ops.gapless.aux_loss.default)  # a trace keeps it, whether its result is used or not
