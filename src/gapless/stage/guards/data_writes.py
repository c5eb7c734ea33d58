"""What a forward does behind autograd's back: it changes a weight through `.data`, or runs a backward of its own.

Torch counts how often a tensor was changed in place, and a step goes by that count: autograd refuses a backward that
would compute with newer numbers, and remat keeps buffers that change and refuses weights that do. `.data` leaves the
count alone. That is harmless in a plain loop, where every backward comes before the next forward; here it would be
wrong without a word. So a layer that asks for the `.data` of a weight or a buffer gets its `.detach()`, which counts.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, increment_version
from torch.nn import Parameter

from gapless.guards.weights_and_gradients import FORWARD_BACKWARDS
from gapless.stage.split.call_mode import Handler, Mode
from gapless.stage.split.call_signature import bound, signature_of
from gapless.stage.split.reached_parameters import Reached

_OF_METHOD, _OF_FUNCTION = signature_of(Tensor.backward), signature_of(torch.autograd.backward)


def _get_data(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _lasts(mode, args[0]):
        return func(*args)
    mode.behind += 1
    return args[0].detach()


def _set_data(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    func(*args)
    if _lasts(mode, args[0]):
        mode.behind += 1
        increment_version(args[0])


def _lasts(mode: Mode, tensor: Tensor) -> bool:
    """Whether later microbatches find it as this one leaves it."""
    if isinstance(tensor, Parameter):
        return True
    modules = (each for part in mode.modules for each in part.modules()) if tensor.is_leaf else ()
    return any(tensor is value for module in modules for value in module._buffers.values())


def _gradient(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A layer that asks for gradients in its forward must find the whole graph, weights included."""
    mode.exclude_deferred()
    return mode.plain(func, args, kwargs)


def _backward(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """May add to gradients of tensors that are the layer's own affair, and not to those of the stage."""
    given = bound(_OF_METHOD if func is Tensor.backward else _OF_FUNCTION, args, kwargs)
    mode.exclude_deferred()
    leaves = given["inputs"]
    if leaves is None:
        leaves = Reached(map(_edge_of, _listed(next(iter(given.values()))))).leaves.values()
    ours = {id(each) for part in mode.modules for each in part.parameters()} | set(mode.leaves)
    for leaf in _listed(leaves):
        if mode.stands_in(leaf) or id(leaf) in ours:
            raise FORWARD_BACKWARDS.refusal(
                "a layer or the loss calls backward() in a forward, which adds to the gradient of a weight or an input "
                f"of its stage, of shape {tuple(leaf.shape)}, in another order than plain training, and with remat "
                "twice"
            )
    return mode.plain(func, args, kwargs)


def _listed(given: Any) -> Iterable[Any]:
    return (given,) if isinstance(given, Tensor | GradientEdge) else given


def _edge_of(given: Tensor | GradientEdge) -> GradientEdge | None:
    if isinstance(given, Tensor):
        return get_gradient_edge(given) if given.requires_grad else None
    return given


HANDLERS: dict[Any, Handler] = {
    Tensor.data.__get__: _get_data,  # type: ignore[attr-defined]
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.autograd.grad: _gradient,
    **dict.fromkeys((Tensor.backward, torch.autograd.backward), _backward),
}
