"""Replicas of one stage: each has the gradients of its own minibatch, and all of them make the same update.

    replica 0   m = 0   2   4           an update takes a group of as many minibatches as there are replicas:
    replica 1       1   3   (none)      the mean of what came, added in the order of minibatches

All replicas of a stage meet in every round, those that have nothing more too, so that no round waits in vain. The
first round in which somebody has nothing more is the last one.

Replicas have a loader each, on ranks that a group connects; or they take turns in the minibatches of one loader, on
devices of one pipeline:

    replica 0   m = 0   3   6           group {6, 7} is not complete: it waits for the rest of it, which a later run may
    replica 1       1   4   7           bring, until all replicas say that the stream ends
    replica 2       2   5   (none)

A minibatch after one that did not come has not come either. Each replica adds up a part of all gradients, from which
the others take it. A ring would carry as much, but add in another order.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise, takewhile
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

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


_SMALL = 64 << 10  # bytes that are sent whole, since a second message takes longer than they do
_KIND = "update"  # of the channels between replicas


class SiblingsInTurns:
    """On devices of one pipeline, among which this one has that place; all have one loader."""

    def __init__(self, links: Any, devices: Sequence[int], place: int, parameters: Sequence[nn.Parameter]) -> None:
        self._links, self._devices, self._place = links, devices, place
        self._others = [each for each in range(len(devices)) if each != place]
        trained = [number for number, each in enumerate(parameters) if each.requires_grad]
        self._flats = [
            _Flat([(number, parameters[number]) for number in trained if parameters[number].dtype is dtype])
            for dtype in dict.fromkeys(parameters[number].dtype for number in trained)
        ]
        self._count = len(parameters)
        self._in_parts = sum(each.num_bytes for each in self._flats) > _SMALL

    def meet(self, own: Grads | None, *, ends: bool) -> Round:
        head = torch.zeros(2 + self._count, dtype=torch.uint8)  # whether there is something, the end, and what there is
        head[1] = ends
        mine: list[Tensor] = []
        if own is not None:
            head[0] = 1
            head[2:] = torch.tensor([each is not None for each in own], dtype=torch.uint8)
            mine = [each.joined(own) for each in self._flats]
        for other in self._others:
            self._send(other, [head, *self._parts(mine, other)])
        rows = self._received([head, *self._parts(mine, self._place)])
        came = list(takewhile(lambda row: bool(row[0][0]), rows))
        whole = len(came) == len(rows)
        if not came or not (whole or all(row[0][1] for row in rows)):
            return Round(None, True, len(came))
        there = [row[0][2:].tolist() for row in came]
        means = [
            flat.mean([row[1 + place] for row in came], there, self._span(flat, self._place))
            for place, flat in enumerate(self._flats)
        ]
        if self._in_parts:
            for other in self._others:
                self._send(other, means)
            rows = self._received(means)
            means = [torch.cat([row[place] for row in rows]) for place in range(len(means))]
        found: list[Tensor | None] = [None] * self._count
        for flat, mean in zip(self._flats, means, strict=True):
            for number, grad in flat.apart(mean):
                found[number] = grad if any(row[number] for row in there) else None
        return Round(found, not whole, 0 if whole else len(came))

    def _span(self, flat: "_Flat", place: int) -> tuple[int, int]:
        """What the replica in this place adds up; each of them everything, where that is little."""
        count, size = len(self._devices), flat.size
        return (size * place // count, size * (place + 1) // count) if self._in_parts else (0, size)

    def _parts(self, tensors: Sequence[Tensor], place: int) -> list[Tensor]:
        spans = [self._span(flat, place) for flat in self._flats]
        return [each[start:end] for each, (start, end) in zip(tensors, spans, strict=False)]

    def _send(self, place: int, tree: Any) -> None:
        self._links.outgoing(self._devices[place], _KIND).hand(tree)

    def _received(self, own: Any) -> list[Any]:
        """From each replica, in order."""
        return [
            own if place == self._place else self._links.incoming(device, _KIND).get()
            for place, device in enumerate(self._devices)
        ]


class _Flat:
    """Gradients of one type, in one row."""

    def __init__(self, parameters: Sequence[tuple[int, nn.Parameter]]) -> None:
        self._parameters = parameters
        self._bounds = [0, *accumulate(each.numel() for _, each in parameters)]
        self.size = self._bounds[-1]
        self.num_bytes = self.size * parameters[0][1].element_size()

    def joined(self, grads: Grads) -> Tensor:
        """On the CPU; zeros for what is not there."""
        parts = [
            torch.zeros_like(each) if (grad := grads[number]) is None else grad for number, each in self._parameters
        ]
        return torch.cat([each.detach().reshape(-1).cpu() for each in parts])

    def mean(self, rows: Sequence[Tensor], there: Sequence[Sequence[int]], span: tuple[int, int]) -> Tensor:
        """Of what came, in its order, within a span of the row."""
        total = rows[0].clone()
        numbers = [number for number, _ in self._parameters]
        if all(row[number] for row in there for number in numbers):
            for row in rows[1:]:
                total.add_(row)
            return total.div_(len(rows))
        for number, (start, end) in zip(numbers, pairwise(self._bounds), strict=True):
            part = slice(max(start, span[0]) - span[0], max(min(end, span[1]) - span[0], 0))
            having = [row[part] for row, has in zip(rows, there, strict=True) if has[number]]
            if having:
                total[part] = having[0]
                for each in having[1:]:
                    total[part].add_(each)
                total[part].div_(len(rows))
        return total

    def apart(self, row: Tensor) -> list[tuple[int, Tensor]]:
        """By the numbers of their parameters, where these are."""
        return [
            (number, row[start:end].view(each.shape).to(each.device))
            for (number, each), (start, end) in zip(self._parameters, pairwise(self._bounds), strict=True)
        ]
