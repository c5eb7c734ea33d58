"""`x @ w`, `x @ w.t()` and `x @ w.t() + b` with the gradients of w and b deferred.

The call runs with the parameters detached, so that autograd computes the input gradient alone, by its own formula; a
hook on the result records the rest. The bits must be those of plain torch, so each case below follows what `at::linear`
and `at::matmul` do:

    input               bias   at::linear is                         here
    2-d                 yes    addmm                                 the same call
    2-d                 no     mm                                    the same call
    n-d contiguous      yes    flatten, addmm, view                  written out: the hook must sit below the view
    n-d otherwise       yes    flatten, mm, unsafe view, add         written out: an addmm otherwise
    n-d                 no     flatten, mm, unsafe view              the same call, if x can be flattened by a view;
                                                                     else written out: torch flattens such an x only if
                                                                     w needs a gradient
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from .call_mode import Mode

Grad = Callable[[Any, Tensor], Tensor]  # a gradient from what was kept and the gradient of the result


def _of_linear(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    return input, weight, bias


def linear(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`F.linear(x, w, b)`."""
    x, weight, bias = _of_linear(*args, **kwargs)
    if not mode.defers(weight, bias) or not _plain_input(x) or x.dim() < 2 or weight.dim() != 2:
        return mode.plain(func, args, kwargs)
    # mm's derivative looks at the layout of w.t(): column-major (w is contiguous) or anything else.
    if weight.stride() == (weight.size(1), 1):
        return _product(mode, x, weight, bias, F.linear, _grad_by_input)
    return _product(mode, x, weight, bias, F.linear, _input_by_grad_transposed)


def matmul(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x @ w` where w is a matrix."""
    if kwargs or len(args) != 2:
        return mode.plain(func, args, kwargs)
    x, weight = args
    if not mode.defers(weight, None) or not _plain_input(x) or x.dim() < 2 or weight.dim() != 2:
        return mode.plain(func, args, kwargs)
    return _product(mode, x, weight, None, torch.matmul, _by_layout(weight))


def addmm(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.addmm(b, x, w)`, which is how GPT-2's Conv1D is written."""
    if kwargs or len(args) != 3:
        return mode.plain(func, args, kwargs)
    bias, x, weight = args
    if not mode.defers(weight, bias) or not _plain_input(x) or bias.shape != weight.shape[1:]:
        return mode.plain(func, args, kwargs)
    return _product(mode, x, weight, bias, lambda x, w, b: torch.addmm(b, x, w), _by_layout(weight))


def _product(
    mode: Mode, x: Tensor, weight: Parameter, bias: Parameter | None, product: Callable[..., Tensor], weight_grad: Grad
) -> Tensor:
    x, w, b, low = mode.stand_ins(x, weight, bias)
    needs_input = x.requires_grad
    shape = folded = added = None
    if x.dim() > 2:
        if b is not None and x.is_contiguous():
            shape = x.shape
            x = x.view(-1, shape[-1])
        else:
            b, added = None, b
            if not _folds(x):
                folded = x.shape
                x = x.reshape(-1, folded[-1])
    y = product(x, w) if b is None else product(x, w, b)
    if folded is not None:
        y = torch.ops.aten._unsafe_view.default(y, (*folded[:-1], y.size(-1)))
    if added is not None:
        y.add_(added)
    record(mode, y, x.detach(), weight, weight_grad, bias, _sum_rows, needs_input=needs_input, low=low)
    return y if shape is None else y.view(*shape[:-1], y.size(-1))


def record(
    mode: Mode,
    y: Tensor,
    kept: Any,
    weight: Parameter,
    weight_grad: Grad,
    bias: Parameter | None = None,
    bias_grad: Grad | None = None,
    *,
    needs_input: bool,
    low: torch.dtype | None = None,
) -> None:
    """Has the gradients of weight and bias recorded as soon as that of y is known; `low` is what autocast casts to.

    Where nothing but the weight needs a gradient, y was computed with a stand-in for the weight that requires one, and
    the hook ends the backward there.
    """
    # Autocast casts a parameter once, so contributions meet before the cast.
    summed_low = low is not None and weight.dtype == torch.float32 and torch.is_autocast_cache_enabled()
    append = mode.recording(weight, bias, summed_low)
    if bias is not None and not bias.requires_grad:
        bias = None

    def hook(grads: tuple[Tensor | None, ...]) -> tuple[None] | None:
        grad = grads[0]
        if grad is not None:
            append((weight, weight_grad, kept, grad, summed_low))
            if bias is not None:
                append((bias, bias_grad, kept, grad, summed_low))
        return None if needs_input else (None,)

    node: Any = y.grad_fn
    node.register_prehook(hook)  # on the node, and not on y: after hooks of the user's that change the gradient of y


def _plain_input(x: Any) -> bool:
    """A parameter as the input needs a gradient of its own, and nested tensors fold in another way."""
    return type(x) is Tensor and not x.is_nested


def _folds(x: Tensor) -> bool:
    """Whether at::matmul flattens x without looking whether w needs a gradient. Strides of dimensions of size one count
    too.
    """
    shape, strides = x.shape, x.stride()
    return all(strides[dim] == strides[dim + 1] * shape[dim + 1] for dim in range(len(shape) - 2))


def _by_layout(weight: Tensor) -> Grad:
    column_major = weight.stride() == (1, weight.size(0))
    return _grad_by_input_transposed if column_major else _input_by_grad


def _flat(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.size(-1))


def _grad_by_input(x: Tensor, grad: Tensor) -> Tensor:
    return _flat(grad).t().mm(_flat(x))


def _grad_by_input_transposed(x: Tensor, grad: Tensor) -> Tensor:
    return _flat(grad).t().mm(_flat(x)).t()


def _input_by_grad(x: Tensor, grad: Tensor) -> Tensor:
    return _flat(x).t().mm(_flat(grad))


def _input_by_grad_transposed(x: Tensor, grad: Tensor) -> Tensor:
    return _flat(x).t().mm(_flat(grad)).t()


def _sum_rows(_: Any, grad: Tensor) -> Tensor:
    return grad.sum(0) if grad.dim() == 2 else grad.sum(tuple(range(grad.dim() - 1)))
