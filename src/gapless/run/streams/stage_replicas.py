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
from torch import Tensor

from gapless.run.ranks.wire.groups import of_each

_KIND = "update"  # of the channels between replicas

Grads = Sequence[Tensor | None]


class Round(NamedTuple):
    """What an update is made of: the mean, or None where there is none to make; whether it was the last; and, of a
    group in turns that is not complete, how many minibatches have come.
    """

    mean: Grads | None
    is_last: bool
    waiting: int = 0


class StageReplicas(Protocol):
    """The replicas of a stage, as one of them sees them."""

    def meet(self, own: Grads | None, *, ends: bool) -> Round:
        """The next round; None: this one has nothing more. `ends`: no later run will bring the rest of a group."""


class NoReplicas:
    """A stage without replicas."""

    def meet(self, own: Grads | None, *, ends: bool) -> Round:
        return Round(own, own is None)


class _FlatGradients:
    """Those of all parameters that learn, in a row for each type."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._count = len(parameters)
        trained = [(number, each) for number, each in enumerate(parameters) if each.requires_grad]
        kinds = dict.fromkeys(each.dtype for _, each in trained)
        self._flats = [_Flat([pair for pair in trained if pair[1].dtype is kind]) for kind in kinds]

    def _head(self, own: Grads | None, *, ends: bool) -> Tensor:
        """Whether there is something, the end, and what there is."""
        there = [each is not None for each in own or [None] * self._count]
        return torch.tensor([own is not None, ends, *there], dtype=torch.uint8)

    def _mean(self, rows: Sequence[Sequence[Tensor]], spans: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Of what came, each with its head, within a span of each flat."""
        there = [row[0][2:].tolist() for row in rows]
        return [
            flat.mean([row[1 + place] for row in rows], there, span)
            for place, (flat, span) in enumerate(zip(self._flats, spans, strict=True))
        ]

    def _apart(self, means: Sequence[Tensor], heads: Sequence[Tensor]) -> Grads:
        """A gradient for each parameter that somebody has one for."""
        found: list[Tensor | None] = [None] * self._count
        for flat, mean in zip(self._flats, means, strict=True):
            for number, grad in flat.apart(mean):
                found[number] = grad if any(head[2 + number] for head in heads) else None
        return found


class ReplicasByGroup(_FlatGradients):
    """On other ranks, which a group connects; each has a loader of its own."""

    def __init__(self, group: Any, parameters: Sequence[Tensor]) -> None:
        super().__init__(parameters)
        self._group = group

    def meet(self, own: Grads | None, *, ends: bool) -> Round:
        mine = [self._head(own, ends=ends), *(flat.joined(own or [None] * self._count) for flat in self._flats)]
        rows = of_each(self._group, torch.cat([each.view(torch.uint8) for each in mine]))
        sizes = [each.nbytes for each in mine]
        came = [
            [part.clone().view(each.dtype) for part, each in zip(row.split(sizes), mine, strict=True)]
            for row in rows
            if row[0]
        ]
        if not came:
            return Round(None, True)
        means = self._mean(came, [(0, flat.size) for flat in self._flats])
        return Round(self._apart(means, [row[0] for row in came]), len(came) < len(rows))


class ReplicasInTurns(_FlatGradients):
    """On devices of one pipeline, among which this one has that place; all have one loader."""

    def __init__(self, links: Any, devices: Sequence[int], place: int, parameters: Sequence[Tensor]) -> None:
        super().__init__(parameters)
        self._links, self._devices, self._place = links, devices, place

    def meet(self, own: Grads | None, *, ends: bool) -> Round:
        head, mine = self._head(own, ends=ends), [] if own is None else [each.joined(own) for each in self._flats]
        rows = self._exchanged([[head, *self._parts(mine, place)] for place in range(len(self._devices))])
        came = list(takewhile(lambda row: bool(row[0][0]), rows))
        whole = len(came) == len(rows)
        if not came or not (whole or all(row[0][1] for row in rows)):
            return Round(None, True, len(came))
        parts = self._exchanged([self._mean(came, self._spans(self._place))] * len(self._devices))
        means = [torch.cat(each) for each in zip(*parts, strict=True)]
        return Round(self._apart(means, [row[0] for row in came]), not whole, 0 if whole else len(came))

    def _spans(self, place: int) -> list[tuple[int, int]]:
        """What the replica in this place adds up."""
        count, sizes = len(self._devices), [flat.size for flat in self._flats]
        return [(size * place // count, size * (place + 1) // count) for size in sizes]

    def _parts(self, tensors: Sequence[Tensor], place: int) -> list[Tensor]:
        return [each[start:end] for each, (start, end) in zip(tensors, self._spans(place), strict=False)]

    def _exchanged(self, mine: Sequence[Any]) -> list[Any]:
        """What is for each replica goes there; what came from each, in order."""
        others = [(place, device) for place, device in enumerate(self._devices) if place != self._place]
        for place, device in others:
            self._links.outgoing(device, _KIND).hand(mine[place])
        came = {place: self._links.incoming(device, _KIND).get() for place, device in others}
        return [came.get(place, mine[place]) for place in range(len(self._devices))]


class _Flat:
    """Gradients of one type, in one row."""

    def __init__(self, parameters: Sequence[tuple[int, Tensor]]) -> None:
        self._parameters = parameters
        self._bounds = [0, *accumulate(each.numel() for _, each in parameters)]
        self.size = self._bounds[-1]

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
        if all(row[number] for row in there for number in numbers):  # a few large sums take less than many small ones
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
