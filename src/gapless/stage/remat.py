"""Remat: keep a cell's inputs instead of its graph, and run its layers again when the backward needs them.

    remat    kept per microbatch            rebuilt
    none     inputs and the whole graph     nothing
    stage    inputs                         the whole graph, by `recompute` or at the start of the backward
    layer    inputs of every layer          one layer's graph at a time, inside the backward, the last layer first

The layers are seeded and cast as in the first run, so the second computes the same bits. The first run builds a graph
too, and lets go of it: without gradients torch takes other kernels in places (oneDNN's LSTM, attention), and whether an
output needs a gradient could not be told. With a split backward the second run happens once: for the first half, and
the second half uses what that recorded. The second run does not count for batch norm (`Work.replaying`), and
changes no buffer.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gapless.errors import ConfigError
from gapless.guards.passed_tensors import CHANGED_INPUTS
from gapless.stage.batch import microbatch as mb
from gapless.stage.guards.changing_buffers import no_late_uses
from gapless.stage.offload.saved_storages import SavedStorages, unpack

from .autocast import AutocastState
from .calls import Calls
from .cell import Cell
from .cell_inputs import copied
from .saved_activations import Kept, Work


class RematCell(Cell):
    """A cell that keeps its inputs alone."""

    remakes = True

    def forward(self, work: Work, inputs: Any, then: Callable[[Any], None] | None = None) -> Any:
        if work.keep:
            return super().forward(work, inputs, then)
        intake = self._intake
        tensors, shape = mb.flatten(inputs, views=self._shares)
        views = mb.views_in(inputs, shape)
        kept = Kept.of([*tensors, *views], shape, AutocastState(), together=intake.together)
        # A layer that changes its input must not change what is kept. Whether there is one, the first run tells.
        copies = [copied(leaf.detach()) for leaf in kept.leaves] if intake.copies else kept.leaves
        # Nor may a copy be laid out in another way, or the layers may take other kernels.
        if not intake.guarded and any(a.stride() != b.stride() for a, b in zip(copies, kept.leaves, strict=True)):
            copies = kept.leaves
        was_copied = copies is not kept.leaves
        leaves = [a.detach().requires_grad_(b.requires_grad) for a, b in zip(copies, kept.leaves, strict=True)]
        first = Kept(leaves, shape, together=kept.together, views=kept.views)
        handed = self._build(work, first, defer=False)
        kept.together = first.together
        kept.buffers, kept.before, kept.after = first.buffers, first.before, first.after
        for each in self._kept.values():
            each.buffers += self._undo.buffers.begun_now()
        intake.tried = True
        if intake.guarded and not was_copied:
            raise CHANGED_INPUTS.refusal(
                "a layer changed its input in place for the first time, but remat needs that input again",
                f"{CHANGED_INPUTS.way_out}, or use remat='none' for its stage",
            )
        self._kept[work.microbatch] = kept
        if then is not None:
            then(handed)
        return handed

    def recompute(self, work: Work) -> None:
        kept = self._kept[work.microbatch]
        if kept.edges is not None:
            return
        assert kept.autocast is not None
        work.replaying = True
        drawn, buffers = self._calls.draws.replayed(), self._undo.buffers.replayed(kept.buffers)
        with torch.enable_grad(), kept.autocast.replayed(), buffers, self._undo.replayed(kept), drawn, no_late_uses():
            self._build(work, kept)
        work.replaying = False

    def kept_leaves(self, microbatch: int) -> list[Tensor]:
        return self._kept[microbatch].leaves

    def pack(self, microbatch: int, saved: SavedStorages) -> None:
        kept = self._kept[microbatch]
        kept.leaves = [_Left(saved.pack(leaf), leaf.requires_grad) for leaf in kept.leaves]  # type: ignore[misc]

    def unpack(self, microbatch: int) -> None:
        kept = self._kept[microbatch]
        kept.leaves = [each.tensor() if type(each) is _Left else each for each in kept.leaves]  # type: ignore[comparison-overlap]

    def backward(
        self, work: Work, grads: list[Tensor | None], then: Callable[[Any], None] | None = None
    ) -> list[Tensor | None]:
        self.recompute(work)
        return super().backward(work, grads, then)


class _Left(NamedTuple):
    """In the place of a leaf."""

    saved: Any
    requires_grad: bool

    def tensor(self) -> Tensor:
        return unpack(self.saved).detach().requires_grad_(self.requires_grad)  # type: ignore[no-any-return]


def cells_of(layers: Sequence[Callable[..., Any]], calls: Calls, *, remat: str, with_loss: bool) -> list[Cell]:
    """The cells of a stage. Layers that share a parameter, and those between them, are one cell: autograd adds up the
    contributions to a parameter within one backward before it accumulates them."""
    if remat == "none":
        return [Cell(calls, range(len(layers)), 0, with_loss=with_loss)]
    if remat not in ("stage", "layer"):
        raise ConfigError(f"remat is {remat!r}, but it must be 'none', 'stage' or 'layer'.")
    loss = calls.parts_of(range(0), with_loss=with_loss)
    bounds = _bounds(layers, loss) if remat == "layer" else [0, len(layers)]
    return [
        RematCell(calls, range(start, end), number, with_loss=with_loss and end == len(layers))
        for number, (start, end) in enumerate(itertools.pairwise(bounds))
    ]


def _bounds(layers: Sequence[Callable[..., Any]], loss: Sequence[Any]) -> list[int]:
    """Where a cell may end: not between two uses of one parameter. The loss belongs to the last layer."""
    owned = [list(layer.parameters()) if isinstance(layer, nn.Module) else [] for layer in layers]
    owned[-1] += [parameter for part in loss if isinstance(part, nn.Module) for parameter in part.parameters()]
    last = {id(parameter): number for number, parameters in enumerate(owned) for parameter in parameters}
    bounds, end = [0], 0
    for number, parameters in enumerate(owned):
        end = max([end, number, *(last[id(parameter)] for parameter in parameters)])
        if end == number:
            bounds.append(number + 1)
    return bounds
