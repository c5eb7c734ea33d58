"""Convolutions and embeddings with the gradients of their parameters deferred: autograd's own derivative, asked for one
part at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import record

if TYPE_CHECKING:
    from .intercept import Mode

_FORWARD = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1, "output_padding": 0}
_SPATIAL = {"conv1d": 1, "conv2d": 2, "conv3d": 3, "conv_transpose1d": 1, "conv_transpose2d": 2, "conv_transpose3d": 3}


def convolution(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`F.conv1d` to `F.conv_transpose3d`."""
    name = func.__name__
    spatial, transposed = _SPATIAL[name], "transpose" in name
    names = _TRANSPOSED if transposed else _FORWARD
    given = {**_DEFAULTS, **dict(zip(names, args, strict=False)), **kwargs}
    x, weight, bias = given["input"], given["weight"], given["bias"]
    padding = _padding(given["padding"], weight, given["dilation"], spatial)
    if not mode.defers(weight, bias) or type(x) is not Tensor or x.dim() != spatial + 2 or padding is None:
        return mode.plain(func, args, kwargs)
    low = mode.autocast_dtype()
    if low is None:
        w, b = weight.detach(), None if bias is None else bias.detach()
    else:
        x, w, b = x.to(low), mode.cast(weight, low), None if bias is None else mode.cast(bias, low)
    needs_input = x.requires_grad
    if not needs_input:
        w.requires_grad_()
    y = func(x, w, b, *(given[key] for key in names[3:]))
    rest = (
        None if b is None else list(b.shape),
        _spread(given["stride"], spatial),
        padding,
        _spread(given["dilation"], spatial),
        transposed,
        _spread(given["output_padding"], spatial),
        given["groups"],
    )
    both = _Both(x.detach(), w.detach(), rest, bias is not None and bias.requires_grad)
    record(
        mode,
        y,
        both,
        weight,
        _Both.weight,
        bias,
        _Both.bias,
        needs_input=needs_input,
        summed_low=mode.sums_low(weight, low),
    )
    return y


class _Both:
    """Weight and bias gradient come from one call; the bias is asked for right after the weight."""

    __slots__ = ("_bias", "_rest", "_w", "_wants_bias", "_x")

    def __init__(self, x: Tensor, w: Tensor, rest: tuple[Any, ...], wants_bias: bool) -> None:
        self._x, self._w, self._rest, self._wants_bias = x, w, rest, wants_bias
        self._bias: Tensor | None = None

    def weight(self, grad: Tensor) -> Tensor:
        mask = [False, True, self._wants_bias]
        weight: Tensor
        _, weight, self._bias = torch.ops.aten.convolution_backward.default(grad, self._x, self._w, *self._rest, mask)
        return weight

    def bias(self, grad: Tensor) -> Tensor:
        bias, self._bias = self._bias, None
        assert bias is not None
        return bias


def embedding(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`F.embedding(indices, weight, ...)`; sparse gradients, and max_norm, which changes the weight, are torch's."""
    return _embedding(mode, func, args, kwargs, *args, **kwargs)


def _embedding(
    mode: Mode,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    input: Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if sparse or max_norm is not None or not mode.defers(weight, None):
        return mode.plain(func, args, kwargs)
    stand_in = weight.detach().requires_grad_()
    y = F.embedding(input, stand_in, padding_idx, None, norm_type, scale_grad_by_freq)
    rows = weight.size(0)
    padding = -1 if padding_idx is None else padding_idx % rows
    kept = (input, rows, padding, scale_grad_by_freq)
    record(mode, y, kept, weight, _embedding_grad, needs_input=False)
    return y


def _embedding_grad(kept: tuple[Tensor, int, int, bool], grad: Tensor) -> Tensor:
    weight: Tensor = torch.ops.aten.embedding_dense_backward.default(grad, *kept)
    return weight


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
