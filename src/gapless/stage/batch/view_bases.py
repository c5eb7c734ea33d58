"""Views that one stage hands on and another changes in place. `nn.Linear` returns a view for sequences.

Where a layer changes a view in place, autograd changes the history of its base. What used the view before keeps the
view's old node, and its hooks hear of that use alone:

    base <-- change in place <-- view <-- used after the change
         <-- view (with its hooks) <----- used before

So the layers of a stage get a view if their input was one where it was made, which a mark on the tensor tells. If they
change it, its gradient is one for the base, and the stage that made it goes on from there: gradients that require one
themselves are for bases. Both marks go with a tensor wherever it is sent.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gapless.guards.passed_tensors import CHANGED_VIEWS


def was_view(tensor: Tensor) -> bool:
    """Whether it was a view in the stage that handed it on."""
    return getattr(tensor, "was_view", False)


def mark_view(tensor: Tensor) -> None:
    """It was."""
    tensor.was_view = True  # type: ignore[attr-defined]


def marked_as(made: Tensor, tensor: Tensor) -> Tensor:
    """A new tensor, with the marks of another one: whether a gradient is wanted, and whether it was a view."""
    if tensor.requires_grad:
        made.requires_grad_()
        if was_view(tensor):
            mark_view(made)
    return made


class Base(NamedTuple):
    """What a view was a view of, without its memory."""

    edge: GradientEdge
    shape: torch.Size
    stride: tuple[int, ...]
    view_shape: torch.Size
    view_stride: tuple[int, ...]
    offset: int  # of the view
    source: int | None  # the number of the input that it is, if that was a view itself

    def grad(self, grad: Tensor) -> Tensor:
        """The gradient of the base, laid out as autograd leaves it behind a change in place."""
        made = torch.empty_strided(self.shape, self.stride, dtype=grad.dtype, device=grad.device)
        if self.shape != self.view_shape and self.shape.numel() != self.view_shape.numel():
            made.zero_()
        made.as_strided(self.view_shape, self.view_stride, self.offset).copy_(grad.detach())
        return made


class Viewed:
    """The inputs of a run that were views where they were made, as its layers get them."""

    def __init__(self, tensors: Sequence[Tensor], numbers: Iterable[int], views: Iterable[Tensor] = ()) -> None:
        """`views` are views of these."""
        self._views = [(view, view._version, view.grad_fn) for view in views]
        self._of: dict[int, tuple[int, Tensor, Any, Any]] = {}
        for number in numbers:
            tensor = tensors[number]
            base = tensor._base if tensor._is_view() else tensor
            assert base is not None
            self._of[id(base)] = number, base, base.grad_fn, tensor.grad_fn

    def source(self, base: Tensor) -> int | None:
        """Which of them this is, unless it was changed."""
        number, _, node, _ = self._of.get(id(base), (None, None, None, None))
        return None if number is None or base.grad_fn is not node else number

    def changed(self, edges: Sequence[GradientEdge | None] | None, stage: int) -> set[int]:
        """Those that were changed in place, after a run that has ended here."""
        found = [(number, before) for number, base, node, before in self._of.values() if base.grad_fn is not node]
        used = [before for _, before in found]
        used += [node for view, version, node in self._views if node is not None and view._version != version]
        if used and edges is not None:
            reached = nodes_of(edges)
            for before in used:
                if before in reached:
                    raise CHANGED_VIEWS.refusal(
                        f"a layer of stage {stage} uses its input and changes it in place afterwards; it comes from "
                        "another stage and is a view there, so its gradients would be added in another order than in "
                        "plain training",
                        f"{CHANGED_VIEWS.way_out}, or clone() the input before",
                    )
        return {number for number, _ in found}


NO_VIEWS = Viewed((), ())


def base_of(tensor: Tensor, viewed: Viewed) -> tuple[bool, Base | None]:
    """Whether a tensor is a view for those who get it, and its base, if a gradient can be written there."""
    base = tensor._base if tensor._is_view() else tensor
    assert base is not None
    source = viewed.source(base)
    if base is tensor and source is None:
        return False, None
    if (
        not base.requires_grad
        or base.dtype != tensor.dtype
        or base.layout is not torch.strided
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return True, None
    edge = get_gradient_edge(base)
    offset = int(tensor.storage_offset()) - int(base.storage_offset())
    return True, Base(edge, base.shape, base.stride(), tensor.shape, tensor.stride(), offset, source)


def late_views(tensors: Sequence[Tensor], edges: Sequence[GradientEdge | None], start: int) -> list[set[int]]:
    """Those of one base, where the node of a view among them was not there before there were `start` nodes: its base
    was changed in place, and the first use since then, which is in another stage, would have made it.
    """
    together: dict[int, set[int]] = {}
    late = set()
    for number, (tensor, edge) in enumerate(zip(tensors, edges, strict=True)):
        if edge is not None:
            base = id(tensor._base if tensor._is_view() else tensor)
            together.setdefault(base, set()).add(number)
            if tensor._is_view() and edge.node._sequence_nr() >= start:
                late.add(base)
    return [together[base] for base in late]


def nodes_of(edges: Iterable[GradientEdge | None]) -> set[Any]:
    """All nodes that a backward from there comes to."""
    to_visit = [edge.node for edge in edges if edge is not None]
    seen = {*to_visit}
    while to_visit:
        for following, _ in to_visit.pop().next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                to_visit.append(following)
    return seen
