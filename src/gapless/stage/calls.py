"""How a stage calls its layers: inside the mode, outside of it, or not at all but by the table's own handler.

The mode costs a few microseconds on every torch call inside it. Torch's own modules are known: most of them neither
hold weights that could wait nor draw, so they run outside; a linear layer's one call is answered directly. Of anything
else nothing is known, and it runs inside.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import GradientEdge
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.module import _has_any_global_hook

from gapless.errors import ConfigError

from . import draws as random
from .autocast import alone_with_casts, autocast_is_on, without_autocast
from .batchnorm import BatchNorm, Statistics
from .compiled import CompiledCalls, is_compiled, is_traced
from .deferred import Records, recording, recording_here
from .draws import Draws
from .intercept import TABLE, Mode, Restart
from .linear import linear
from .plain import apply_first
from .seeds import seed_of
from .stored import Stored
from .unseen import watched

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()
_DRAWING = (_DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d, nn.RNNBase, nn.MultiheadAttention)
_HEAVY = (nn.Linear, nn.Embedding, _ConvNd, nn.MultiheadAttention)


class Way(Enum):
    """How a layer is called."""

    OUTSIDE = "outside the mode"
    IN_TRAINING = "inside in training, outside in eval mode"
    DIRECTLY = "by the handler for linear"
    INSIDE = "inside the mode"
    COMPILED = "outside the mode, alone where it compiles or draws"


_run_backward: Any = torch.autograd.Variable._execution_engine.run_backward


def _backward(edges: Sequence[GradientEdge], grads: Sequence[Tensor]) -> None:
    """What torch.autograd.backward calls in the end; on small tensors its checks cost a third of a backward."""
    _run_backward(tuple(edges), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True)


_OUTSIDE, _DIRECTLY, _INSIDE = Way.OUTSIDE, Way.DIRECTLY, Way.INSIDE


class Calls:
    """The calls of one stage: its layers, its loss, its backwards."""

    def __init__(
        self,
        layers: Sequence[Callable[..., Any]],
        first_layer: int,
        *,
        seed: int,
        split: bool,
        loss: Callable[[Any, Any], Tensor] | None,
        spread: bool,
        batchnorm: BatchNorm = "microbatch",
        first_microbatch: int = 0,
        stored: Stored | None = None,
    ) -> None:
        self.stored = Stored() if stored is None else stored
        self._layers: list[tuple[Any, Way]] = [(layer, _way(layer, split)) for layer in layers]
        self._loss = loss
        self._loss_way = Way.OUTSIDE if loss is None else _way(loss, split)
        self._spread = spread
        self._split = split
        self._first_layer, self._first_microbatch = first_layer, first_microbatch
        self.draws = Draws(seed)
        self.statistics = Statistics(batchnorm, [*layers, loss])
        self._mode = Mode(self.draws, self.statistics)
        modules = [part for part in (*layers, loss) if isinstance(part, nn.Module)]
        self._parameters = [parameter for module in modules for parameter in module.parameters()]
        self._compiled = {index: CompiledCalls(layer) for index, layer in enumerate(layers) if is_compiled(layer)}
        self._compiled_loss = CompiledCalls(loss) if is_compiled(loss) else None
        self._cold = False  # something was compiled in this step
        self._cold_seconds = 0.0
        self._casting: set[int] = set()  # layers, -1 for the loss, with an autocast of their own
        self._watched: set[tuple[int, bool]] = set()  # layers, -1 for the loss, of which it is known what they draw
        outside = all(way is Way.OUTSIDE and not is_traced(layer) for layer, way in self._layers) and loss is None
        self._bare: list[Any] | None = None
        if outside and all(isinstance(layer, nn.Module) and _plainly_called(layer) for layer in layers):
            self._bare = list(layers)
        self._forwards = [layer.forward for layer in self._bare or []]
        # What runs outside the mode uses its parameters unseen.
        for layer, way in (*self._layers, (loss, self._loss_way)):
            if way in (Way.OUTSIDE, Way.COMPILED) and isinstance(layer, nn.Module) and not is_traced(layer):
                self._mode.excluded.update(id(parameter) for parameter in layer.parameters())

        for layer in layers:
            if is_traced(layer):
                layer.bind(self.place, self.answer, split=split, exclude=self.exclude)  # type: ignore[attr-defined]

    def place(self, number: int) -> None:
        """The next draw is the `number`-th random call of the model, which counts as its layer."""
        draws = self.draws
        draws.layer = number
        if self._mode.alone:
            torch.manual_seed(seed_of(draws.seed, draws.step, draws.microbatch, number))

    def answer(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answers one call of a traced graph."""
        handler = TABLE.get(function)
        if handler is not None:
            return handler(self._mode, function, args, kwargs)
        if isinstance(function, OpOverload):
            return random.draw(self._mode, function, args, kwargs)
        with self._mode:
            return function(*args, **kwargs)

    def exclude(self, parameters: Sequence[nn.Parameter]) -> None:
        """Leaves the gradients of these to autograd."""
        self._mode.excluded.update(id(parameter) for parameter in parameters)

    def parts_of(self, layers: range, *, with_loss: bool) -> list[Any]:
        """Some of the layers, and the loss."""
        return [*(self._layers[index][0] for index in layers), *([self._loss] if with_loss else [])]

    @property
    def deferred(self) -> Mapping[int, tuple[nn.Parameter, bool]]:
        """What this forward has deferred, by id, and whether it was cast by autocast."""
        return self._mode.deferred

    @property
    def casts(self) -> Mapping[Tensor, Any]:
        """The nodes of the casts that this forward has made itself, in autocast's place."""
        return self._mode.own_casts

    def cast_anew(self, parameter: Tensor) -> bool:
        """Has autocast's cast of a parameter made anew by every forward; whether that is news."""
        if id(parameter) in self._mode.cast_anew:
            return False
        self._mode.cast_anew.add(id(parameter))
        return True

    def parameters_of(self, layers: range, *, with_loss: bool) -> list[nn.Parameter]:
        """Those of some of the layers, each once."""
        parts = self.parts_of(layers, with_loss=with_loss)
        found = [parameter for part in parts if isinstance(part, nn.Module) for parameter in part.parameters()]
        return list(dict.fromkeys(found))

    def bare(self) -> list[Callable[..., Any]] | None:
        """The layers, where nothing they do needs to be seen, so that they may be called just so with one tensor; else
        None.
        """
        if self._bare is None or _has_any_global_hook():
            return None
        for layer in self._bare:
            if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
                return None
        return self._forwards

    @property
    def num_compiled(self) -> int:
        """How many of the layers are compiled."""
        return len(self._compiled)

    @property
    def compile_seconds(self) -> float:
        """What the calls lasted in which layers were compiled."""
        calls = [*self._compiled.values(), *([self._compiled_loss] if self._compiled_loss is not None else [])]
        return self._cold_seconds + sum(each.seconds for each in calls)

    def begin(self, records: Records | None, step: int, microbatch: int) -> AbstractContextManager[Any]:
        """Around a forward. Weight gradients go to `records`, if the stage splits its backward and this forward has
        one.
        """
        draws = self.draws
        if step != draws.step:
            self.forget()
        draws.step, draws.microbatch = step, self._first_microbatch + microbatch
        draws.restart()
        self._mode.begin(records if self._split else None, self._device().type)
        return random.alone([torch.device("cpu"), self._device()]) if self._mode.alone else _NOTHING

    def layer(self, index: int, value: Any) -> Any:
        """Calls layer `index` of the stage."""
        layer, way = self._layers[index]
        mode, draws = self._mode, self.draws
        draws.layer = self._first_layer + index
        if mode.alone:
            torch.manual_seed(seed_of(draws.seed, draws.step, draws.microbatch, draws.layer))
        if mode.cast_anew:
            pass  # every call must be seen
        elif way is _DIRECTLY and type(value) is Tensor and not _has_hooks(layer):
            if mode.defers_now:
                return linear(mode, F.linear, (value, layer.weight, layer.bias), {})
            return layer(value)
        elif way is _OUTSIDE and not _has_hooks(layer) and not (self._spread and index == 0):
            return layer(value)
        if way is Way.COMPILED:
            return self._layer_compiled(index, value)
        with (
            alone_with_casts() if index in self._casting else _NOTHING,
            mode if self._inside(layer, way) else _NOTHING,
            self._first_watched(index, layer) if way is _INSIDE else _NOTHING,
        ):
            return apply_first(layer, value) if self._spread and index == 0 else layer(value)

    def _first_watched(self, index: int, layer: Any) -> AbstractContextManager[None]:
        """Around a call of which nothing is known: the first one tells whether it draws unseen."""
        key = (index, getattr(layer, "training", True))
        if self._mode.alone or key in self._watched:
            return _NOTHING
        return self._watch(key)

    @contextlib.contextmanager
    def _watch(self, key: tuple[int, bool]) -> Iterator[None]:
        with watched([torch.device("cpu"), self._device()]) as touched:
            yield
        self._watched.add(key)
        if touched.casts:
            self._casting.add(key[0])
        if touched.seen:
            self._mode.alone = True
            raise Restart

    def _layer_compiled(self, index: int, value: Any) -> Any:
        layer, draws = self._layers[index][0], self.draws
        spread = self._spread and index == 0
        seed = seed_of(draws.seed, draws.step, draws.microbatch, draws.layer)
        result, cold = self._compiled[index](
            value, seed, self._device(), lambda: apply_first(layer, value) if spread else layer(value)
        )
        self._cold = self._cold or cold
        return result

    def loss(self, outputs: Any, target: Any) -> Any:
        """Calls the loss."""
        assert self._loss is not None
        if self._compiled_loss is not None:
            return self._loss_compiled(self._compiled_loss, outputs, target)
        try:
            with (
                alone_with_casts() if -1 in self._casting else _NOTHING,
                self._mode if self._inside(self._loss, self._loss_way) else _NOTHING,
                self._first_watched(-1, self._loss) if self._loss_way is _INSIDE else _NOTHING,
            ):
                return self._loss(outputs, target)
        except (AttributeError, TypeError) as error:
            if target is None:
                raise ConfigError(
                    f"no target was given, and the loss failed without one ({type(error).__name__}: {error}): pass it "
                    "after the inputs, as step(inputs, target)"
                ) from error
            raise

    def _loss_compiled(self, calls: CompiledCalls, outputs: Any, target: Any) -> Any:
        assert self._loss is not None
        loss = self._loss
        result, cold = calls((outputs, target), 0, self._device(), lambda: loss(outputs, target))
        if calls.draws:
            raise ConfigError("a compiled loss draws random numbers, which can't be seeded: leave it uncompiled.")
        self._cold = self._cold or cold
        return result

    def backward(self, records: Records, edges: Sequence[GradientEdge], grads: Sequence[Tensor]) -> None:
        """Runs autograd, outside of autocast; what is deferred goes to `records`."""
        if self._cold:  # torch compiles a backward when it first runs
            with random.alone([]):
                start = time.perf_counter()
                self._backward_with_care(records, edges, grads)
                self._cold_seconds += time.perf_counter() - start
        elif autocast_is_on() or self._mode.alone or (self._split and not grads[0].is_cpu):
            self._backward_with_care(records, edges, grads)
        elif self._split:
            with recording_here(records):
                _backward(edges, grads)
        else:
            _backward(edges, grads)

    def _backward_with_care(self, records: Records, edges: Sequence[GradientEdge], grads: Sequence[Tensor]) -> None:
        with (
            without_autocast(),
            random.alone([]) if self._mode.alone else _NOTHING,
            recording(records, edges, grads[0].device) if self._split else _NOTHING,
        ):
            _backward(edges, grads)

    def forget(self) -> None:
        """Lets go of what lasts for one step."""
        self._mode.forget()
        self._cold = False

    def _inside(self, layer: Any, way: Way) -> bool:
        if way is Way.COMPILED:
            return False
        if self._mode.cast_anew:
            return True
        if way is Way.OUTSIDE:
            return _has_hooks(layer)
        return way is not Way.IN_TRAINING or any(module.training for module in layer.modules()) or _has_hooks(layer)

    def _device(self) -> torch.device:
        return self._parameters[0].device if self._parameters else torch.device("cpu")


def _way(layer: Any, split: bool) -> Way:
    if is_traced(layer):
        return Way.COMPILED if is_compiled(layer) else Way.OUTSIDE
    if getattr(layer, "draws_nothing_and_defers_itself", False):
        return Way.OUTSIDE  # its own promise: see `zoo.emulated`
    if is_compiled(layer):
        return Way.COMPILED  # modes would be traced into it
    if not isinstance(layer, nn.Module):
        return Way.OUTSIDE if _is_torchs(layer) and layer not in TABLE else Way.INSIDE
    modules = list(layer.modules())
    if any(
        not _is_torchs(type(module)) or _has_hooks(module) or isinstance(module, LazyModuleMixin) for module in modules
    ):
        return Way.INSIDE
    if split and type(layer) is nn.Linear:
        return Way.DIRECTLY
    if any(isinstance(module, _NormBase) or (split and isinstance(module, _HEAVY)) for module in modules):
        return Way.INSIDE
    return Way.IN_TRAINING if any(_may_draw(module) for module in modules) else Way.OUTSIDE


def _may_draw(module: nn.Module) -> bool:
    return isinstance(module, _DRAWING) and bool(getattr(module, "p", getattr(module, "dropout", True)))


def _is_torchs(thing: Any) -> bool:
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


def _plainly_called(layer: nn.Module) -> bool:
    """Whether calling it is, where it has no hooks, nothing but its forward."""
    return type(layer).__call__ is nn.Module._wrapped_call_impl and layer._compiled_call_impl is None


def _has_hooks(layer: Any) -> bool:
    """Whether a module's call is more than its class's forward."""
    return isinstance(layer, nn.Module) and bool(
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or "forward" in layer.__dict__
        or _has_any_global_hook()
    )
