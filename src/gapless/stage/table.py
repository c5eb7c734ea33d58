"""The torch calls that a stage answers itself, each with what answers it."""

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import batchnorm
from .convolution import convolution, embedding
from .linear import addmm, linear, matmul
from .mode import Handler, Mode
from .random_calls import RANDOM, RECURRENT, attention, dropout, recurrent


def _opened(function: Any) -> Handler:
    """A handler for one of torch's own Python functions that hides the calls of the table: it runs a copy of the
    function that does not ask for modes, with the mode on."""
    scope = {
        **function.__globals__,
        "has_torch_function": _no,
        "has_torch_function_unary": _no,
        "has_torch_function_variadic": _no,
    }
    copy: Any = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__

    def handler(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with mode:
            return copy(*args, **kwargs)

    return handler


def _gradient(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A layer that asks for gradients in its forward must find the whole graph, weights included."""
    mode.exclude_deferred()
    return mode.plain(func, args, kwargs)


def _no(*_: Any) -> bool:
    return False


TABLE: dict[Any, Handler] = {
    F.linear: linear,
    torch.matmul: matmul,
    Tensor.matmul: matmul,
    Tensor.__matmul__: matmul,
    torch.mm: matmul,
    Tensor.mm: matmul,
    torch.addmm: addmm,
    torch.autograd.grad: _gradient,
    Tensor.backward: _gradient,
    F.embedding: embedding,
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), convolution),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), convolution),
    F.dropout: dropout,
    F.scaled_dot_product_attention: attention,
    **dict.fromkeys(RANDOM, Mode.draw),
    **dict.fromkeys(RECURRENT, recurrent),
    **batchnorm.HANDLERS,
    F.multi_head_attention_forward: _opened(F.multi_head_attention_forward),
}
if hasattr(F, "linear_cross_entropy"):
    TABLE[F.linear_cross_entropy] = _opened(F.linear_cross_entropy)
