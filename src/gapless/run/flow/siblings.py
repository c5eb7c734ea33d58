"""Replicas of one stage: each has the gradients of its own minibatch, and all of them make the same update.

    replica 0   m = 0   2   4           an update takes a group of as many minibatches as there are replicas:
    replica 1       1   3   (none)      the mean of what came, added in the order of minibatches

All replicas of a stage meet in every round, those that have nothing more too, so that no round waits in vain. The
first round in which somebody has nothing more is the last one.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

_ALIGNED = 64

Grads = Sequence[Tensor | None]


class Round(NamedTuple):
    """What an update is made of: the mean, or None where there is none to make; whether it was the last; and, of a
    group in turns that is not complete, how many minibatches have come.
    """

    mean: Grads | None
    is_last: bool
    waiting: int = 0


class Siblings(Protocol):
    """The replicas of a stage, as one of them sees them."""

    def meet(self, own: Grads | None, *, ends: bool) -> Round:
        """The next round; None: this one has nothing more. `ends`: no later run will bring the rest of a group."""


class Alone:
    """A stage without replicas."""

    def meet(self, own: Grads | None, *, ends: bool) -> Round:
        return Round(own, own is None)


class SiblingRanks:
    """On other ranks, which a group connects; each has a loader of its own."""

    def __init__(self, group: Any, parameters: Sequence[Tensor]) -> None:
        self._group, self._parameters = group, parameters
        self._head = _padded(1 + len(parameters))  # whether there is something, and what

    def meet(self, own: Grads | None, *, ends: bool) -> Round:
        sizes = [_padded(each.numel() * each.element_size()) for each in self._parameters]
        mine = torch.zeros(self._head + sum(sizes), dtype=torch.uint8)
        if own is not None:
            mine[0] = 1
            at = self._head
            for place, (grad, size) in enumerate(zip(own, sizes, strict=True)):
                if grad is not None:
                    mine[1 + place] = 1
                    data = grad.detach().cpu().contiguous().view(-1).view(torch.uint8)
                    mine[at : at + len(data)] = data
                at += size
        rows = [torch.empty_like(mine) for _ in range(self._group.size())]
        self._group.allgather([rows], [mine]).wait()
        came = [row for row in rows if row[0]]
        return Round(self._mean(came, sizes) if came else None, len(came) < len(rows))

    def _mean(self, rows: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor | None]:
        made: list[Tensor | None] = []
        at = self._head
        for place, (like, size) in enumerate(zip(self._parameters, sizes, strict=True)):
            total: Tensor | None = None
            for row in rows:
                if row[1 + place]:
                    part = row[at : at + like.numel() * like.element_size()].view(like.dtype).view(like.shape)
                    total = part.clone() if total is None else total.add_(part)
            made.append(None if total is None else total.div_(len(rows)).to(like.device))
            at += size
        return made


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
