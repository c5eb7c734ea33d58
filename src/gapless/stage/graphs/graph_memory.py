"""Tensors at the fixed places that CUDA graphs read and write: what goes in, what comes out, what goes to `.grad`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gapless.stage.batch import microbatch as mb
from gapless.stage.batch.own_copies import copies, copy, made_like
from gapless.stage.batch.view_bases import mark_view, marked_as, was_view
from gapless.stage.random.draws import UncapturableError

from .replay import Replay, borrowed

Grads = list[Tensor | None]
_BATCH = 1 << 26  # bytes


class FixedTree:
    """A tree of tensors that graphs read: its values change, its places do not."""

    def __init__(self, tree: Any) -> None:
        given, shape = mb.flatten(tree, views=True)
        tensors = [marked_as(made_like(each), each) for each in given]
        self.tree = mb.unflatten(tensors, shape)
        self._places = [each.detach() for each in tensors]
        self.take(tree)

    def copied(self) -> Any:
        """Another one, which nobody overwrites."""
        tensors, shape = mb.flatten(self.tree, views=True)
        return mb.unflatten([marked_as(each.detach().clone(), each) for each in tensors], shape)

    @property
    def versions(self) -> list[int]:
        """That change where a layer changes its inputs in place."""
        return [each._version for each in self._places]

    def take(self, tree: Any) -> None:
        """The values of another one that is made alike."""
        copy(self._places, mb.flatten(tree, views=True)[0])


class LeftTree:
    """A tree of tensors that a graph leaves: copied at once, since the next graph may write there."""

    def __init__(self, tree: Any) -> None:
        tensors, self._shape = mb.flatten(tree, views=True)
        self._marks = [(each.requires_grad, was_view(each)) for each in tensors]
        self._places = [_place(each) for each in tensors]

    def copied(self) -> Any:
        made = copies(self._places)
        for each, (wanted, is_view) in zip(made, self._marks, strict=True):
            if wanted:
                each.requires_grad_()
            if is_view:
                mark_view(each)
        return mb.unflatten(made, self._shape)


class GraphedHalf:
    """A backward, or one of its halves, of which a graph was made."""

    def __init__(
        self, replay: Replay, grads: Grads, found: Sequence[Tensor | None], added: Sequence[tuple[Parameter, Tensor]]
    ) -> None:
        self.replay = replay
        self._grads = grads
        self._given = [_made_alike(each) for each in grads]
        self._found = [None if each is None else _place(each) for each in found]
        self._for_bases = [each is not None and each.requires_grad for each in found]
        self.added = [(parameter, _place(each)) for parameter, each in added]

    def added_in_full(self) -> list[Tensor]:
        """What the last replay has left for parameters, in their precision."""
        return [each.to(parameter.dtype) for parameter, each in self.added]

    def takes(self, grads: Grads) -> bool:
        """Whether these are made like those that it was captured with; if so they are there now."""
        if self._given != [_made_alike(each) for each in grads]:
            return False
        pairs = [(mine, each) for mine, each in zip(self._grads, grads, strict=True) if mine is not None]
        copy([mine for mine, _ in pairs], [each for _, each in pairs if each is not None])
        return True

    def again(self) -> Grads:
        """The gradients that it took last."""
        return list(self._grads)

    def found(self) -> Grads:
        """The gradients of the inputs that the last replay has left."""
        made = iter(copies([each for each in self._found if each is not None]))
        found = [None if each is None else next(made) for each in self._found]
        for each, for_base in zip(found, self._for_bases, strict=True):
            if for_base and each is not None:
                each.requires_grad_()
        return found


@torch.no_grad()
def add_grads(added: Sequence[tuple[Parameter, Tensor]]) -> None:
    """Adds these to the parameters' `.grad`, whether those were set to None or not."""
    fresh = [(parameter, each) for parameter, each in added if parameter.grad is None]
    more = [(parameter.grad, each) for parameter, each in added if parameter.grad is not None]
    if full := [(grad, each) for grad, each in more if each.dtype == grad.dtype]:
        torch._foreach_add_([grad for grad, _ in full], [each for _, each in full])
    for some in _in_batches([(grad, each) for grad, each in more if each.dtype != grad.dtype]):
        cast = [torch.empty_like(grad) for grad, _ in some]
        copy(cast, [each for _, each in some])
        torch._foreach_add_([grad for grad, _ in some], cast)
    if fresh:
        made = [torch.empty_like(parameter) for parameter, _ in fresh]
        copy(made, [each for _, each in fresh])
        for (parameter, _), grad in zip(fresh, made, strict=True):
            parameter.grad = grad


def _in_batches(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """As many at once as keep a GPU busy; the memory of their casts is taken once."""
    batch: list[tuple[Tensor, Tensor]] = []
    size = 0
    for grad, each in pairs:
        batch.append((grad, each))
        size += grad.nbytes
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class GraphedMicrobatch:
    """What was captured for one of the microbatches that may be under way at once."""

    def __init__(self, inputs: Any, target: Any, weight: float | Tensor, dtype: torch.dtype | None) -> None:
        """`dtype` is that of the loss. A number that multiplies it is a scalar in the precision in which torch would
        multiply, so that its gradient has the same bits.
        """
        self.inputs, self.target = FixedTree(inputs), FixedTree(target)
        self.weight: Any = 1.0
        self._number: float | None = None
        if dtype is not None:
            precise = torch.float64 if dtype == torch.float64 else torch.float32
            device = torch.cuda.current_device()
            self.weight = (
                torch.empty((), dtype=precise, device=device) if isinstance(weight, float) else made_like(weight)
            )
            self._weigh(weight)
        self.forward: Replay
        self.handed: LeftTree
        self.halves: dict[str, GraphedHalf] = {}

    def take(self, inputs: Any, target: Any, weight: float | Tensor) -> None:
        """The next microbatch."""
        self.inputs.take(inputs)
        self.target.take(target)
        if isinstance(self.weight, Tensor):
            self._weigh(weight)

    def replayed(
        self, halves: Sequence[str], seed: Callable[[int], int], parameters: Sequence[Parameter]
    ) -> tuple[Any, Grads, list[Tensor]]:
        """The last microbatch once more: what it hands on, the gradients of its inputs, and of parameters."""
        self.forward.run(seed)
        handed, found, sums = self.handed.copied(), Grads(), dict[Parameter, Tensor]()
        for half in (self.halves[each] for each in halves):
            half.replay.run(seed)
            found = found or half.found()
            for (parameter, _), grad in zip(half.added, half.added_in_full(), strict=True):
                sums[parameter] = sums[parameter] + grad if parameter in sums else grad
        return handed, found, [sums[each] for each in parameters if each in sums]

    def _weigh(self, weight: float | Tensor) -> None:
        if isinstance(weight, Tensor):
            self.weight.copy_(weight)
        elif weight != self._number:
            self.weight.fill_(weight)
            self._number = weight


@contextmanager
def grads_aside(
    parameters: Sequence[Parameter], low: Mapping[Parameter, Tensor] = MappingProxyType({})
) -> Iterator[list[tuple[Parameter, Tensor]]]:
    """While it holds, no parameter has a gradient; what was added meanwhile is what it yields, filled when it ends.
    What is in `low` by then was to be added, too.
    """
    before = [each.grad for each in parameters]
    for each in parameters:
        each.grad = None
    added: list[tuple[Parameter, Tensor]] = []
    try:
        yield added
        found = ((each, low.get(each, each.grad)) for each in parameters)
        added += [(each, grad) for each, grad in found if grad is not None]
    finally:
        for each, grad in zip(parameters, before, strict=True):
            each.grad = grad


def fixed_grads(grads: Grads) -> Grads:
    """Copies at places of their own."""
    places = [None if each is None else made_like(each) for each in grads]
    copy([each for each in places if each is not None], [each for each in grads if each is not None])
    return [each if of is None or each is None else marked_as(each, of) for each, of in zip(places, grads, strict=True)]


def _place(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda" or tensor.layout != torch.strided:
        raise UncapturableError(f"a tensor is on the {tensor.device.type} or has the layout {tensor.layout}")
    if tensor.is_conj() or tensor.is_neg():
        raise UncapturableError("a tensor is the conjugate or the negative of another, which is in its place")
    return borrowed(tensor.detach())


def _made_alike(tensor: Tensor | None) -> Any:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
