"""`x @ w`, `x @ w.t()` and `x @ w.t() + b` with the gradients of w and b deferred.

The call runs with the parameters detached, so that autograd computes the input gradient alone, by its own formula; a
hook on the result records the rest. The bits must be those of plain torch, so each case below follows what `at::linear`
and `at::matmul` do:

    input               bias   at::linear is                         here
    2-d                 yes    addmm                                 the same call
    2-d                 no     mm                                    the same call
    n-d contiguous      yes    flatten, addmm, view                  the same call; the hook sits below the view
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

from gapless.stage.offload.saved_storages import unpack

from .call_mode import Mode, Put

Grad = Callable[[Any, Tensor], Tensor]  # a gradient from what was kept and the gradient of the result


def _of_linear(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    return input, weight, bias


def linear(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`F.linear(x, w, b)`."""
    if not mode.defers_now:
        return func(*args, **kwargs)
    x, weight, bias = args if len(args) == 3 and not kwargs else _of_linear(*args, **kwargs)
    if type(weight) is not Parameter or weight.dim() != 2 or (bias is not None and bias.dim() != 1):
        return mode.plain(func, args, kwargs)
    if type(x) is not Tensor or x.dim() < 2:
        return mode.plain(func, args, kwargs)
    # mm's derivative looks at the layout of w.t(): column-major (w is contiguous) or anything else.
    weight_grad = _grad_by_input if weight.stride() == (weight.size(1), 1) else _input_by_grad_transposed
    y = _product(mode, x, weight, bias, F.linear, weight_grad)
    return mode.plain(func, args, kwargs) if y is None else y


def matmul(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x @ w` where w is a matrix."""
    if not mode.defers_now or kwargs or len(args) != 2 or type(args[0]) is not Tensor or type(args[1]) is not Parameter:
        return mode.plain(func, args, kwargs)
    x, weight = args
    if x.dim() < 2 or weight.dim() != 2:
        return mode.plain(func, args, kwargs)
    y = _product(mode, x, weight, None, torch.matmul, _by_layout(weight))
    return mode.plain(func, args, kwargs) if y is None else y


def addmm(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.addmm(b, x, w)`, which is how GPT-2's Conv1D is written."""
    if not mode.defers_now or kwargs or len(args) != 3 or type(args[1]) is not Tensor or type(args[2]) is not Parameter:
        return mode.plain(func, args, kwargs)
    bias, x, weight = args
    if bias.shape != weight.shape[1:]:
        return mode.plain(func, args, kwargs)
    y = _product(mode, x, weight, bias, lambda x, w, b: torch.addmm(b, x, w), _by_layout(weight))
    return mode.plain(func, args, kwargs) if y is None else y


def _product(
    mode: Mode, x: Tensor, weight: Parameter, bias: Parameter | None, product: Callable[..., Tensor], weight_grad: Grad
) -> Tensor | None:
    """None where the gradients can't wait. Nested tensors fold in another way."""
    stood = None if x.is_nested else mode.stand_ins(x, weight, bias)
    if stood is None:
        return None
    x, w, b, put = stood
    node: Any
    if x.dim() == 2 or (b is None and _folds(x)):
        y = product(x, w) if b is None else product(x, w, b)
        node = y.grad_fn
    elif b is not None and x.is_contiguous():
        y = product(x, w, b)
        node = y.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        assert node.name() == "AddmmBackward0", f"torch's linear ends with {node.name()} below its view"
    else:
        folded = None if _folds(x) else x.shape
        x = x if folded is None else x.reshape(-1, folded[-1])
        y = product(x, w)
        if folded is not None:
            y = torch.ops.aten._unsafe_view.default(y, (*folded[:-1], y.size(-1)))
        if b is not None:
            y.add_(b)
        node = y.grad_fn
    kept = x.detach()
    record(put, node, kept, kept, weight, weight_grad, bias, _sum_rows, needs_input=x.requires_grad)
    return y


def record(
    put: Put,
    node: Any,
    x: Tensor,
    kept: Any,
    weight: Parameter,
    weight_grad: Grad,
    bias: Parameter | None = None,
    bias_grad: Grad | None = None,
    *,
    needs_input: bool,
) -> None:
    """Has the gradients of weight and bias recorded as soon as that of the node's result is known. Autograd checks that
    x is as it was only if it saves x for a gradient of its own.

    Where nothing but the weight needs a gradient, the result was computed with a stand-in for the weight that requires
    one, and the hook ends the backward there.
    """
    records, summed_low, saved = put
    if bias is not None and not bias.requires_grad:
        bias = None
    held, version = (x, x._version) if saved is None else (None, 0)
    if saved is not None and type(kept) is Tensor:
        kept = saved.pack(kept)

    def hook(grads: tuple[Tensor | None, ...]) -> tuple[None] | None:
        grad = grads[0]
        if grad is not None:
            there = unpack(kept)
            records.append((weight, weight_grad, there, grad, summed_low))
            if bias is not None:
                records.append((bias, bias_grad, there, grad, summed_low))
            records.need(grad, grad._version, is_grad=True)
            if held is not None:
                records.need(held, version)
            elif type(there) is Tensor:
                records.need(there, there._version)
        return None if needs_input else (None,)

    node.register_prehook(hook)  # on the node, and not on y: after hooks of the user's that change the gradient of y


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
    return (grad if grad.dim() == 2 else _flat(grad)).t().mm(x if x.dim() == 2 else _flat(x))


def _grad_by_input_transposed(x: Tensor, grad: Tensor) -> Tensor:
    return _flat(grad).t().mm(_flat(x)).t()


def _input_by_grad(x: Tensor, grad: Tensor) -> Tensor:
    return _flat(x).t().mm(_flat(grad))


def _input_by_grad_transposed(x: Tensor, grad: Tensor) -> Tensor:
    return _flat(x).t().mm(_flat(grad)).t()


def _sum_rows(_: Any, grad: Tensor) -> Tensor:
    return grad.sum(0) if grad.dim() == 2 else grad.sum(tuple(range(grad.dim() - 1)))
