"""Tensors of a tree that share memory: a tensor and a view of it, two views of one tensor.

In the plain loop a layer that changes one of them changes the others too. So what goes from stage to stage is one
tensor, the base, and the others are made from it again as its views:

    (h, h[:, :3])             h is handed on
    (h[:, :4], h[:, 2:])      h is handed on, though it is not in the tree
    the same without grad     the stretch of memory in which they are

Each of them has a gradient of its own, which goes where it goes in plain training. Where a layer changes one in place
they can't: then their gradients meet at the base.
"""

from collections.abc import Collection, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from gapless.guards.passed_tensors import SHARED_MEMORY

NodeOutput = tuple[Any, int]  # a node, and which of its outputs
NOWHERE = -1  # the place of a tensor that only views are made of


class View(NamedTuple):
    """A tensor that is made from the `number`-th, which may be a view itself; `offset` counts from there. All of it can
    be written as JSON.
    """

    number: int
    shape: list[int]
    stride: list[int]
    offset: int
    has_history: bool  # its gradient goes to the base

    def of(self, base: Tensor) -> Tensor:
        """The view of another base. Where it has all of the base's elements, its gradient gets there laid out as it
        came: that decides in which order others sum.
        """
        start = int(base.storage_offset()) + self.offset
        with torch.enable_grad():
            base = base if self.has_history else base.detach()
            made = base.as_strided(self.shape, self.stride, start)
            if made.numel() != base.numel() or not _is_dense(made) or not _is_dense(base):
                return made
            outer_first = _outer_first(made)
            rows = base.permute(_outer_first(base)).view([self.shape[dim] for dim in outer_first])
            return rows.permute([outer_first.index(dim) for dim in range(made.dim())])


def _outer_first(tensor: Tensor) -> list[int]:
    """Its dimensions, so that it would be contiguous."""
    steps = [*zip(tensor.stride(), tensor.shape, strict=True)]
    return sorted(range(tensor.dim()), key=steps.__getitem__, reverse=True)


class OwnGradient(torch.autograd.Function):
    """A view whose gradient goes to a leaf of its own instead of its base. Torch refuses to change it in place, and to
    use it once its base was changed.
    """

    @staticmethod
    def forward(ctx: Any, view: Tensor, leaf: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return view

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        return None, grad


OWN_CHANGED = "This view was created inside a custom Function"  # what torch then says


def places_of(views: Sequence[tuple[int, View]]) -> list[int]:
    """In a tree, of those that are there."""
    return sorted(place for place, _ in views if place != NOWHERE)


def made_with_views(
    tensors: Sequence[Tensor], views: Sequence[tuple[int, View]], own: Sequence[Tensor]
) -> list[Tensor]:
    """The tensors and the views that are made from them; `own` are the leaves of those at `places_of` them."""
    made = [*tensors]
    for _, view in views:
        made.append(view.of(made[view.number]))
    leaf_at = dict(zip(places_of(views), own, strict=True)) if own else {}
    for number, (place, _) in enumerate(views, len(tensors)):
        if place in leaf_at and made[number].requires_grad:
            made[number] = OwnGradient.apply(made[number], leaf_at[place])  # type: ignore[no-untyped-call]
    return made


class WithoutViews(NamedTuple):
    """Tensors that share no memory, the views that are made from them, one after the other, and which of all these each
    of the tensors is.
    """

    tensors: list[Tensor]
    views: list[View]
    found: list[int]


def with_views(tensors: Sequence[Tensor]) -> WithoutViews:
    """Take those apart from the others that share memory with them."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(memory_of(tensor), []).append(tensor)
    if len(groups) == len(tensors):
        return WithoutViews(list(tensors), [], list(range(len(tensors))))
    bases: list[Tensor] = []
    made: list[tuple[Tensor, Tensor]] = []
    for group in groups.values():
        for members in _overlapping(group):
            base = members[0] if len(members) == 1 else _base_of(members)
            if base is None:
                bases += members
            else:
                bases.append(base)
                made += _made_from(base, members)
    numbers = {id(each): number for number, each in enumerate([*bases, *(view for view, _ in made)])}
    views = [_view(numbers[id(parent)], view, parent) for view, parent in made]
    return WithoutViews(bases, views, [numbers[id(tensor)] for tensor in tensors])


def _made_from(base: Tensor, members: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The views among them, as they were made one after the other, each with the one that its gradient comes to. Where
    gradients of several meet on the way, a view of its own stands for that place.
    """
    ends = {get_gradient_edge(each)[:2]: each for each in (*members, base) if has_history(each)}
    came_from: dict[NodeOutput, Any] = {}
    for view in members:
        for node, edge in _way(view.grad_fn, ends):
            if edge not in ends and came_from.setdefault(edge, node) is not node:
                ends[edge] = base.detach().requires_grad_()
    made = [(-1, each, base) for each in members if not has_history(each) and each is not base]
    for (start, _), view in ends.items():
        if view is not base:
            parent, number = base, -1
            for node, edge in _way(start, ends):
                parent, number = ends.get(edge, base), node._sequence_nr()
            made.append((number, view, parent))
    made.sort(key=itemgetter(0))
    ordered, there = list[tuple[Tensor, Tensor]](), {id(base)}
    while made:  # a change in place makes the node of a view anew: it may be younger than those of views of it
        _, view, parent = made.pop(next(n for n, (_, _, parent) in enumerate(made) if id(parent) in there))
        ordered.append((view, parent))
        there.add(id(view))
    return ordered


def _way(node: Any, ends: Collection[NodeOutput]) -> Iterator[tuple[Any, NodeOutput]]:
    """The nodes from there on, each with where it hands its gradient, up to the first of these ends. Of several views,
    autograd runs the node with the highest number first.
    """
    while node is not None and (len(node.next_functions) == 1 or isinstance(node, OwnGradient._backward_cls)):
        edge = node.next_functions[0]
        yield node, edge
        node = None if edge in ends else edge[0]


def has_history(tensor: Tensor) -> bool:
    """Whether its gradient goes on from here. Torch lets a view that is made under no_grad require one, of which nobody
    hears.
    """
    return tensor.requires_grad and (tensor.grad_fn is not None or not tensor._is_view())


def memory_of(tensor: Tensor) -> Any:
    """By which those that share it are known."""
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
        fitting = [each for each in graded or members if _holds(each, min(starts), max(ends))]
        if fitting:  # the one that the gradients of all others come to in plain training too, if there is one
            return next((each for each in fitting if _all_meet(graded, each)), fitting[0])
        for base in (each._base for each in graded):
            if base is not None and base.dtype == members[0].dtype and _holds(base, min(starts), max(ends)):
                return base
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


def _holds(tensor: Tensor, start: int, end: int) -> bool:
    """Whether it is all that lies in this stretch of memory, and may be more."""
    own_start, own_end = _stretch(tensor)
    return own_start <= start and own_end >= end and _is_dense(tensor)


def _all_meet(views: list[Tensor], base: Tensor) -> bool:
    """Whether the gradients of these come to the base."""
    return all(
        each is base or get_gradient_edge(base)[:2] in [edge for _, edge in _way(each.grad_fn, ())] for each in views
    )


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements are all that lies in its stretch, each of them once."""
    filled = 1
    for step, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if step != filled:
                return False
            filled *= length
    return True


def _view(number: int, tensor: Tensor, base: Tensor) -> View:
    offset = int(tensor.storage_offset()) - int(base.storage_offset())
    return View(number, list(tensor.shape), list(tensor.stride()), offset, has_history(tensor))
