"""Tensors of a tree that share memory: a tensor and a view of it, two views of one tensor.

In the plain loop a layer that changes one of them changes the others too. So what goes from stage to stage is one
tensor, the base, and the others are made from it again as its views:

    (h, h[:, :3])             h is handed on
    (h[:, :4], h[:, 2:])      h is handed on, though it is not in the tree
    the same without grad     the stretch of memory in which they are

Their gradients meet at the base, in autograd's order.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapless.guards.passed_tensors import SHARED_MEMORY


class View(NamedTuple):
    """A tensor that is made from the `number`-th; `offset` counts from there. All of it can be written as JSON."""

    number: int
    shape: list[int]
    stride: list[int]
    offset: int
    has_history: bool  # its gradient goes to the base

    def of(self, base: Tensor) -> Tensor:
        """The view of another base."""
        start = int(base.storage_offset()) + self.offset
        with torch.enable_grad():
            base = base if self.has_history else base.detach()
            return base.as_strided(self.shape, self.stride, start)


def with_views(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[int | View]]:
    """Tensors that share no memory, and how each one is found there: by its number, or as a view."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(_memory(tensor), []).append(tensor)
    if len(groups) == len(tensors):
        return list(tensors), list(range(len(tensors)))
    bases: list[Tensor] = []
    found: dict[int, int | View] = {}
    for group in groups.values():
        for members in _overlapping(group):
            base = members[0] if len(members) == 1 else _base_of(members)
            for each in members:
                is_base = base is None or each is base
                found[id(each)] = len(bases) if is_base else _view(len(bases), each, base)
                if base is None:
                    bases.append(each)
            if base is not None:
                bases.append(base)
    return bases, [found[id(tensor)] for tensor in tensors]


def has_history(tensor: Tensor) -> bool:
    """Whether its gradient goes on from here. Torch lets a view that is made under no_grad require one, of which nobody
    hears.
    """
    return tensor.requires_grad and (tensor.grad_fn is not None or not tensor._is_view())


def _memory(tensor: Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.numel() == 0:
        return id(tensor), None  # nothing is known of it, or nothing is there
    return tensor.untyped_storage()._cdata


def _stretch(tensor: Tensor) -> tuple[int, int]:
    """From which byte of its memory to which one its elements lie."""
    size, start = tensor.itemsize, int(tensor.storage_offset())
    last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start * size, (start + last + 1) * size


def _overlapping(group: list[Tensor]) -> list[list[Tensor]]:
    """Those whose stretches overlap; parts of one memory that lie apart have nothing to do with each other."""
    found: list[list[Tensor]] = []
    end = -1
    for start, stop, _, tensor in sorted((*_stretch(each), number, each) for number, each in enumerate(group)):
        if start >= end:
            found.append([])
        found[-1].append(tensor)
        end = max(end, stop)
    return found


def _base_of(members: list[Tensor]) -> Tensor | None:
    """What all of them are views of, in a way that can be handed on; None if they have to go apart."""
    graded = [each for each in members if has_history(each)]
    starts, ends = zip(*map(_stretch, members), strict=True)
    alike = len({(each.dtype, each.is_conj(), each.is_neg(), type(each)) for each in members}) == 1
    if alike:
        for each in (*(graded or members), *(each._base for each in graded)):
            if each is not None and each.dtype == members[0].dtype and _is_dense(each):
                start, end = _stretch(each)
                if start <= min(starts) and end >= max(ends):
                    return each
        if not graded:
            size = members[0].itemsize
            return members[0].detach().as_strided([(max(ends) - min(starts)) // size], [1], min(starts) // size)
    if graded:
        shapes = " and ".join(str(tuple(each.shape)) for each in members[:2])
        raise SHARED_MEMORY.refusal(
            f"a layer hands on tensors of shapes {shapes} that share memory, but not as views of one tensor that goes "
            "to the next stage"
        )
    return None


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements are all that lies in its stretch, each of them once."""
    filled = 1
    for step, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if step != filled:
                return False
            filled *= length
    return True


def _view(number: int, tensor: Tensor, base: Tensor | None) -> View:
    assert base is not None
    offset = int(tensor.storage_offset()) - int(base.storage_offset())
    return View(number, list(tensor.shape), list(tensor.stride()), offset, has_history(tensor))
