"""Weight gradients that can wait: nobody but the optimizer needs them, while another device waits for the input
gradients.

During the backward's first half each intercepted call records (parameter, function, what it needs); the second half
computes and adds. A record holds detached tensors only: one with its history would, through the autograd graph that
holds the records, hold itself, in a cycle that Python's collector cannot see.

Autograd sums the contributions to a parameter within one backward, in the order in which they arrive, and then adds the
sum to `.grad`: acc + (c1 + c2). So does `accumulate`; any other order would differ in the last bits.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter

from gapless.errors import GaplessError
from gapless.guards.weights_and_gradients import SAVED_TENSORS, SECOND_USES
from gapless.stage.autocast import autocast_is_on, casts_are_kept, without_autocast

from .graph_task import Running
from .reached_parameters import Reached, is_cast

_PARAMETER = itemgetter(0)  # of a record
_KNOWS_GRAD_DTYPE = hasattr(Tensor, "grad_dtype")
_set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
_num_references: Callable[[int], int] = torch._C._storage_Use_Count


class Records(list[Any]):
    """The recorded weight gradients of one microbatch of one stage, each a tuple:

    (parameter, function, what to call it with, the gradient to call it with, summed_low)

    `summed_low`: contributions are added up in their own, lower precision before the cast to the parameter's, because
    autocast casts a parameter once and caches the result.
    """

    # Parameters, by id, that nothing but one compiled region uses; with those whose gradients have waited before.
    sole: Mapping[int, set[int]] = MappingProxyType({})
    # Where gradients are left that are not cast to the precision of their parameters yet; else they are, and added.
    low: dict[Parameter, Tensor] | None = None
    # What W computes with, how often that had changed in place, and whether it is a gradient.
    needed: Sequence[tuple[Tensor, int, bool]] = ()

    def need(self, tensor: Tensor, version: int, *, is_grad: bool = False) -> None:
        """W will compute with this one."""
        self.needed = self.needed if type(self.needed) is list else []
        self.needed.append((tensor, version, is_grad))

    @property
    def run_code_of_users(self) -> bool:
        """Whether to add them up calls hooks, or what was given to `defer`."""
        return any(item[1] is _call or has_hooks(item[0]) for item in self)

    def accumulate(self) -> None:
        """Computes every contribution and adds it to `.grad`, letting go of each record on the way."""
        if not self:
            return
        if autocast_is_on():
            with without_autocast():
                self.accumulate()
            return
        for tensor, version, is_grad in self.needed:
            if tensor._version != version:
                raise _changed(is_grad)
        self.needed = ()
        graded = torch.is_grad_enabled()
        _set_grad_enabled(False)  # torch.no_grad costs ten times as much, in every W
        try:
            if len({*map(id, map(_PARAMETER, self))}) < len(self):
                self._accumulate_sums()
            else:  # each parameter gets one contribution
                self.reverse()
                while self:
                    parameter, function, kept, grad, _ = self.pop()
                    self._add(parameter, function(kept, grad), shared=function in _SHARED)
        finally:
            _set_grad_enabled(graded)

    def _accumulate_sums(self) -> None:
        items = self
        left: dict[int, int] = {}  # how many contributions a parameter still gets
        left_low: dict[int, int] = {}  # and how many of these meet before a cast
        for item in items:
            key = id(item[0])
            left[key] = left.get(key, 0) + 1
            if item[4]:
                left_low[key] = left_low.get(key, 0) + 1
        items.reverse()
        sums: dict[int, _Sum] = {}
        while items:
            parameter, function, kept, grad, summed_low = items.pop()
            value = function(kept, grad)
            key = id(parameter)
            more = left[key] = left[key] - 1
            if more == 0 and key not in sums:
                self._add(parameter, value, shared=function in _SHARED)
                continue
            total = sums.setdefault(key, _Sum())
            if summed_low:
                left_low[key] -= 1
            total.add(value, parameter, summed_low, last=not left_low.get(key))
            if more == 0:
                add_grad(parameter, sums.pop(key).value())

    def _add(self, parameter: Parameter, grad: Tensor, *, shared: bool) -> None:
        low = self.low
        if low is None or grad.dtype == parameter.dtype or parameter in low or shared or not may_be_low(parameter):
            add_grad(parameter, grad, shared=shared)
        else:
            low[parameter] = grad


def _changed(is_grad: bool) -> GaplessError:
    waited = "a weight gradient waited, and a tensor that it needs was changed in place meanwhile, "
    if not is_grad:
        return SAVED_TENSORS.refusal(f"{waited}most likely a buffer that the forward of a later microbatch has changed")
    return SAVED_TENSORS.refusal(
        f"{waited}a gradient by a hook or by the backward of a custom function",
        "return a new tensor there, as grad.clamp(-1, 1) does and grad.clamp_(-1, 1) does not",
    )


class _Sum:
    """The contributions to one parameter, added in the order of their arrival."""

    __slots__ = ("_high", "_low")

    def __init__(self) -> None:
        self._high: Tensor | None = None
        self._low: Tensor | None = None

    def add(self, value: Tensor, parameter: Tensor, summed_low: bool, *, last: bool) -> None:
        """`last`: no more come that meet before the cast. The cast is made at the first use, so its gradient arrives
        with the last contribution.
        """
        if summed_low and value.dtype != parameter.dtype:
            self._low = value if self._low is None else self._low + value
            if not last:
                return
            value, self._low = self._low, None
        value = in_grad_dtype(parameter, value)
        if self._high is not None:  # torch adds what is sparse to what is dense, and not the other way round
            value = value + self._high if self._high.is_sparse else self._high + value
        self._high = value

    def value(self) -> Tensor:
        assert self._high is not None
        return self._high


def in_grad_dtype(parameter: Tensor, grad: Tensor) -> Tensor:
    """As autograd casts it on its way to `.grad`: where torch knows `grad_dtype`, a parameter may say to what, or
    None for nothing.
    """
    dtype = getattr(parameter, "grad_dtype", parameter.dtype)
    return grad if dtype is None or grad.dtype == dtype else grad.to(dtype)


def may_be_low(parameter: Tensor) -> bool:
    """Whether a gradient of lower precision is cast to that of the parameter in the end."""
    return bool(getattr(parameter, "grad_dtype", parameter.dtype) == parameter.dtype)


def add_grad(parameter: Tensor, grad: Tensor, *, shared: bool = False) -> None:
    """What autograd's own accumulation does; and that itself, where hooks wait for it. A gradient that somebody else
    may hold (`shared`) is not kept but copied: two parameters must never share one `.grad`.
    """
    dtype = getattr(parameter, "grad_dtype", grad.dtype)  # as in `in_grad_dtype`
    if dtype is not grad.dtype or not _KNOWS_GRAD_DTYPE:
        grad = in_grad_dtype(parameter, grad)
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks or (shared and grad.is_sparse):
        with torch.enable_grad():
            torch.autograd.backward((get_gradient_edge(parameter),), (grad,))
        return
    before = parameter.grad
    if before is not None:
        before.add_(grad)
    elif grad.stride() == parameter.stride():
        parameter.grad = grad.clone() if shared or is_viewed(grad) else grad
    else:
        parameter.grad = torch.empty_like(parameter, dtype=grad.dtype).copy_(grad)


def is_viewed(grad: Tensor, tensors: int = 1) -> bool:
    """Whether more tensors than these have its memory: somebody may still read it when `.grad` is added to."""
    return type(grad) is Tensor and _num_references(grad.untyped_storage()._cdata) > tensors + 1  # that of this storage


def has_hooks(leaf: Tensor) -> bool:
    """Whether something is called with its gradient."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


recording: Running[Records] = Running()  # around a backward: where `defer` puts what is deferred


def defer(parameter: Tensor, closure: Callable[[], Tensor]) -> Tensor | None:
    """For the backward of a custom autograd function: the gradient of `parameter`, now or later.

    If the backward is split, `closure` is kept for the second half, and the result is None, which the function returns
    as that gradient; otherwise `closure` runs at once and its value is the result. So one line serves both:
    `return grad * w, defer(ctx.parameter, lambda: (grad * x).sum(0))`.

    The closure must hold no tensor that has a grad_fn, and not `ctx`. `parameter` is the parameter itself, not what
    `ctx.saved_tensors` returns for it; anything but a leaf is not deferred.
    """
    records = recording.now()
    if records is None or type(parameter) is not Parameter or not parameter.requires_grad:
        return closure()
    records.append((parameter, _call, (closure, parameter.shape), None, False))
    return None


def divert(
    edges: list[GradientEdge | None] | None, parameters: Collection[int], records: Records, own_casts: Collection[Any]
) -> None:
    """Has the gradients of these parameters (by id) recorded that this graph would add to `.grad` itself: each part as
    soon as autograd has it, so that all are added up in autograd's order, and in the turn of their microbatch. Of the
    casts that autocast makes, no other graph has `own_casts`.
    """
    edges = edges or []
    for number, edge in enumerate(edges):
        leaf = None if edge is None else getattr(edge.node, "variable", None)
        if leaf is not None and id(leaf) in parameters:
            edges[number] = get_gradient_edge(leaf.view_as(leaf))
    for node, number, leaf in Reached(edges).users():
        if id(leaf) in parameters:
            if has_hooks(leaf):
                raise SECOND_USES.refusal(
                    f"a weight of shape {tuple(leaf.shape)} has a hook, and only some microbatches use it in a second "
                    "way, so a split backward can't call the hook in their order",
                    f"remove the hook, or {SECOND_USES.way_out}",
                )
            if casts_are_kept() and is_cast(node) and node not in own_casts:
                raise SECOND_USES.refusal(
                    f"under autocast, only some microbatches use a weight of shape {tuple(leaf.shape)} in a second "
                    "way, and a split backward can't add up what autocast has cast in their order"
                )
            node.register_hook(functools.partial(_record, records.append, leaf, number))


def _record(
    append: Callable[[Any], None], leaf: Tensor, number: int, grads: tuple[Tensor | None, ...], _: Any
) -> tuple[Tensor | None, ...] | None:
    if grads[number] is None:
        return None
    append((leaf, given, grads[number], None, False))
    return (*grads[:number], None, *grads[number + 1 :])


def given(kept: Tensor, _: Any) -> Tensor:
    """A contribution that is there already."""
    return kept


def _call(kept: tuple[Callable[[], Tensor], torch.Size], _: Any) -> Tensor:
    closure, shape = kept
    value = closure()
    if value.requires_grad:
        value = value.detach()
    # As autograd does: what broadcasting spread is summed.
    return value if value.shape == shape else value.sum_to_size(shape)


_SHARED = (_call, given)
