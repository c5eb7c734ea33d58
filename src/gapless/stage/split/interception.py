"""How a layer is called: inside the mode, outside of it, or not at all but by the table's own handler.

The mode costs a few microseconds on every torch call inside it. Torch's own modules are known: most of them neither
hold weights that could wait nor draw, so they run outside; a linear layer's one call is answered directly. Of anything
else nothing is known, and it runs inside.
"""

import sys
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.module import _has_any_global_hook

from gapless.stage.compiled import is_compiled, is_traced

from .call_table import TABLE

_DRAWING = (_DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d, nn.RNNBase, nn.MultiheadAttention)
_HEAVY = (nn.Linear, nn.Embedding, _ConvNd, nn.MultiheadAttention)


class Way(Enum):
    """How a layer is called."""

    OUTSIDE = "outside the mode"
    IN_TRAINING = "inside in training, outside in eval mode"
    DIRECTLY = "by the handler for linear"
    INSIDE = "inside the mode"
    COMPILED = "outside the mode, alone where it compiles or draws"


def way_of(layer: Any, split: bool) -> Way:
    """The quickest way in which nothing goes unseen; `split`: weight gradients may wait."""
    if is_traced(layer):
        return Way.COMPILED if is_compiled(layer) else Way.OUTSIDE
    if getattr(layer, "draws_nothing_and_defers_itself", False):
        return Way.OUTSIDE  # its own promise: see `zoo.emulated`
    if is_compiled(layer):
        return Way.COMPILED  # modes would be traced into it
    if not isinstance(layer, nn.Module):
        return Way.OUTSIDE if is_torchs(layer) and layer not in TABLE else Way.INSIDE
    modules = list(layer.modules())
    if is_open(layer) or any(isinstance(module, LazyModuleMixin) for module in modules):
        return Way.INSIDE
    if split and type(layer) is nn.Linear:
        return Way.DIRECTLY
    if any(isinstance(module, _NormBase) or (split and isinstance(module, _HEAVY)) for module in modules):
        return Way.INSIDE
    return Way.IN_TRAINING if any(_may_draw(module) for module in modules) else Way.OUTSIDE


def is_open(layer: Any) -> bool:
    """Whether there is code in it that is not torch's own, and may use whatever it likes."""
    if is_traced(layer) or getattr(layer, "draws_nothing_and_defers_itself", False):
        return is_compiled(layer)
    if not isinstance(layer, nn.Module):
        return layer is not None and not is_torchs(layer)
    return any(not is_torchs(type(module)) or has_hooks(module) for module in layer.modules())


def _may_draw(module: nn.Module) -> bool:
    return isinstance(module, _DRAWING) and bool(getattr(module, "p", getattr(module, "dropout", True)))


def is_torchs(thing: Any) -> bool:
    """Whether it is one of torch's own modules or functions, and does what torch has written: a copy may bear its name
    (functools.wraps gives it one), and a program may put a forward of its own into torch's class.
    """
    home = getattr(thing, "__module__", None) or ""
    if not home.startswith(("torch.nn.modules.", "torch.nn.functional")):
        return False
    if getattr(sys.modules.get(home), getattr(thing, "__name__", ""), None) is not thing:
        return False
    return not isinstance(thing, type) or (
        getattr(thing.forward, "__module__", "").startswith("torch.nn.")  # type: ignore[attr-defined]
        and thing.__call__ is nn.Module._wrapped_call_impl
    )


def has_hooks(layer: Any) -> bool:
    """Whether a module's call is more than its class's forward."""
    if not isinstance(layer, nn.Module):
        return False
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        return True
    return "forward" in layer.__dict__ or bool(_has_any_global_hook())


class BareLayers:
    """Layers of torch's own that may be called just so with one tensor: nothing that they and the loss do needs to be
    seen.
    """

    def __init__(self, layers: Sequence[tuple[Any, Way]], loss: tuple[Any, Way]) -> None:
        self._loss = loss[0]
        outside = all(way is Way.OUTSIDE and not is_traced(layer) for layer, way in layers)
        outside = outside and loss[1] is Way.OUTSIDE and not _has_tensors(loss[0])
        self.exist = outside and all(is_plainly_called(layer) for layer, _ in layers)
        self._layers: list[Any] = [layer for layer, _ in layers] if self.exist else []
        self._forwards = [layer.forward for layer in self._layers]

    def now(self, target: Any) -> list[Callable[..., Any]] | None:
        """Their forwards, if they may be called so with this target."""
        if not self.exist or _has_any_global_hook():
            return None
        if target is not None and (type(target) is not Tensor or target.requires_grad):
            return None
        if self._loss is not None and has_hooks(self._loss):
            return None
        for layer in self._layers:
            if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
                return None
        return self._forwards


def is_plainly_called(layer: Any) -> bool:
    """Whether calling it is, where it has no hooks, nothing but its forward."""
    if not isinstance(layer, nn.Module):
        return False
    return type(layer).__call__ is nn.Module._wrapped_call_impl and layer._compiled_call_impl is None


def _has_tensors(loss: Any) -> bool:
    """Which may be somebody's parameters, whose use must be seen."""
    if not isinstance(loss, nn.Module):
        return False
    return any(True for _ in loss.parameters()) or any(True for _ in loss.buffers())
