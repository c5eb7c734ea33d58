"""Convolutions and embeddings with the gradients of their parameters deferred: autograd's own derivative, asked for one
part at a time.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gapless.stage.offload.saved_storages import unpack

from .call_mode import Mode
from .call_signature import bound, signature_of
from .linear import record

_TENSORS = dict.fromkeys(("input", "weight", "bias"))
_FORWARD = {**_TENSORS, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_TRANSPOSED = {**_TENSORS, "stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
_EMBEDDING = signature_of(F.embedding)
CONVOLUTIONS = {getattr(torch, f"conv{way}{dims}d"): dims for way in ("", "_transpose") for dims in (1, 2, 3)}


def convolution(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`F.conv1d` to `F.conv_transpose3d`."""
    if not mode.defers_now:
        return func(*args, **kwargs)
    spatial, transposed = CONVOLUTIONS[func], "transpose" in func.__name__
    given = bound(_TRANSPOSED if transposed else _FORWARD, args, kwargs)
    x, weight, bias, *options = given.values()
    padding = _padding(given["padding"], weight, given["dilation"], spatial)
    stood = None
    if type(x) is Tensor and x.dim() == spatial + 2 and padding is not None:
        stood = mode.stand_ins(x, weight, bias)
    if stood is None:
        return mode.plain(func, args, kwargs)
    x, w, b, put = stood
    y = func(x, w, b, *options)
    rest = (
        None if b is None else list(b.shape),
        _spread(given["stride"], spatial),
        padding,
        _spread(given["dilation"], spatial),
        transposed,
        _spread(given.get("output_padding", 0), spatial),
        given["groups"],
    )
    saved = put[2]
    both = _Both(
        x.detach() if saved is None else saved.pack(x.detach()),
        w.detach(),
        rest,
        bias is not None and bias.requires_grad,
    )
    record(put, y.grad_fn, x, both, weight, _Both.weight, bias, _Both.bias, needs_input=x.requires_grad)
    return y


class _Both:
    """Weight and bias gradient come from one call; the bias is asked for right after the weight."""

    __slots__ = ("_bias", "_rest", "_w", "_wants_bias", "_x")

    def __init__(self, x: Any, w: Tensor, rest: tuple[Any, ...], wants_bias: bool) -> None:
        self._x, self._w, self._rest, self._wants_bias = x, w, rest, wants_bias
        self._bias: Tensor | None = None

    def weight(self, grad: Tensor) -> Tensor:
        mask = [False, True, self._wants_bias]
        weight: Tensor
        _, weight, self._bias = torch.ops.aten.convolution_backward.default(
            grad, unpack(self._x), self._w, *self._rest, mask
        )
        return weight

    def bias(self, grad: Tensor) -> Tensor:
        bias, self._bias = self._bias, None
        assert bias is not None
        return bias


def embedding(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`F.embedding(indices, weight, ...)`; sparse gradients, and max_norm, which changes the weight, are torch's."""
    if not mode.defers_now:
        return func(*args, **kwargs)
    indices, weight, padding_idx, max_norm, norm_type, by_freq, sparse = bound(_EMBEDDING, args, kwargs).values()
    stood = None if sparse or max_norm is not None else mode.stand_ins(indices, weight, None, casts=False)
    if stood is None:
        return mode.plain(func, args, kwargs)
    _, w, _, put = stood
    y = F.embedding(indices, w, padding_idx, None, norm_type, by_freq)
    rows = weight.size(0)
    kept = (indices, rows, -1 if padding_idx is None else padding_idx % rows, by_freq)
    record(put, y.grad_fn, indices, kept, weight, _embedding_grad, needs_input=False)
    return y


def _embedding_grad(kept: tuple[Tensor, int, int, bool], grad: Tensor) -> Any:
    return torch.ops.aten.embedding_dense_backward.default(grad, *kept)


def _spread(value: Any, spatial: int) -> list[int]:
    if isinstance(value, int):
        return [value] * spatial
    values = list(value)
    return values * spatial if len(values) == 1 else values


def _padding(padding: Any, weight: Any, dilation: Any, spatial: int) -> list[int] | None:
    """The numbers meant; None where torch pads in a step of its own."""
    if padding == "valid":
        return [0] * spatial
    if padding == "same":
        totals = [d * (size - 1) for d, size in zip(_spread(dilation, spatial), weight.shape[2:], strict=True)]
        return None if any(total % 2 for total in totals) else [total // 2 for total in totals]
    return _spread(padding, spatial)
