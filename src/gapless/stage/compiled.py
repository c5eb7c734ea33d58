"""Layers that went through torch.compile: nothing in them can be seen, so they are called as they are.

Their weight gradients can wait where torch.compile has made all of a layer: `split.compiled_backward`. What they draw
comes from torch's default generators, which all threads share; and while torch compiles it saves and restores these. So
the first call for each kind of input, the one that compiles, is made alone, with seeded generators, and tells from
which of them numbers were drawn. If there are such, all calls for this kind are made alone with these seeded; if not,
they are free.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gapless.stage.batch import microbatch as mb
from gapless.stage.random.draws import Draws, UncapturableError, default_generators, seeded
from gapless.stage.split.compiled_backward import Cutting

from .settings import settings

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def is_compiled(layer: Any) -> bool:
    """Whether a layer, or a part of it, is compiled: by torch.compile, or in place by its own `compile()`."""
    if not isinstance(layer, nn.Module):
        return hasattr(layer, "_torchdynamo_orig_callable")
    if is_traced(layer):
        return layer.compiler is not None
    return any(is_optimized(module) or module._compiled_call_impl is not None for module in layer.modules())


def is_traced(layer: Any) -> bool:
    """Whether it is a piece of a traced graph, which knows its calls and asks for the answers itself."""
    return getattr(layer, "counts_draws", False) is True


class CompiledCalls:
    """The calls of one compiled layer."""

    def __init__(self, layer: Any) -> None:
        # Compiling asks for this. Where there is no GPU, torch 2.11 sets something that ends with the thread that asks
        # first, and crashes later: so that is not one of the pipeline's own.
        torch._C._ensureCUDADeviceGuardSet()
        self._layer = layer
        self._drawn: dict[Any, list[torch.Generator]] = {}  # by kind of input: what its calls draw from
        self.seconds = 0.0  # of the calls that compiled

    def __call__(
        self, call: Callable[..., Any], args: tuple[Any, ...], draws: Draws, device: torch.device
    ) -> tuple[Any, bool]:
        """The result, and whether this call may have compiled."""
        tensors = list(args) if type(args[0]) is Tensor and len(args) == 1 else mb.flatten(args)[0]
        kind = self._kind(tensors)
        drawn = self._drawn.get(kind)
        seed = draws.seed_here()
        if draws.are_captured:
            if drawn is None or any(each.device.type == "cpu" for each in drawn):
                raise UncapturableError("a compiled layer draws on the CPU" if drawn else "a layer would be compiled")
            with draws.swapped_in(device) if drawn else contextlib.nullcontext():
                return call(*args), False
        if drawn is not None:
            with seeded(drawn, seed) if drawn else contextlib.nullcontext():
                return call(*args), False
        # The call that compiles, and tells which generators move.
        generators = default_generators([device, *(tensor.device for tensor in tensors)])
        _say_that_it_compiles()
        with seeded(generators, seed):
            start = time.perf_counter()
            before = [generator.get_state() for generator in generators]
            result = call(*args)
            after = [generator.get_state() for generator in generators]
            self.seconds += time.perf_counter() - start
        self._drawn[kind] = [
            generator for generator, a, b in zip(generators, before, after, strict=True) if not torch.equal(a, b)
        ]
        if any(each.device.type == "cuda" for each in self._drawn[kind]):
            draws.on_gpu.add(draws.layer)
        return result, True

    @property
    def draws(self) -> bool:
        """Whether a call has drawn."""
        return any(self._drawn.values())

    def _kind(self, tensors: Sequence[Tensor]) -> Any:
        """What torch may compile anew for."""
        shapes = tuple([(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad) for tensor in tensors])
        return shapes, settings(), _modes(self._layer)


def _say_that_it_compiles() -> None:
    """Torch must say so meanwhile, as it does by itself since 2.13: older ones take a compiled call in one thread for a
    part of what another one traces, and refuse it.
    """
    if torch.__version__ >= "2.13":
        return
    handler: Any = torch._dynamo.callback_handler
    if _compiles not in handler.start_callbacks:  # torch.compiler.reset() forgets them
        handler.register_start_callback(_compiles)
        handler.register_end_callback(_has_compiled)


def _compiles(_: Any) -> None:
    torch.compiler._is_compiling_flag = True


def _has_compiled(_: Any) -> None:
    torch.compiler._is_compiling_flag = False


def _modes(layer: Any) -> tuple[bool, ...]:
    """Which modules of the layer train, and which parameters need a gradient. Asked at every call: it must be quick."""
    modules = [layer] if isinstance(layer, nn.Module) else []
    modes = []
    for module in modules:  # grows on the way
        modes.append(module.training)
        if module._parameters:
            modes += [parameter is not None and parameter.requires_grad for parameter in module._parameters.values()]
        if module._modules:
            modules += [part for part in module._modules.values() if part is not None]
    return tuple(modes)


@dataclasses.dataclass(frozen=True, eq=False)
class Compiler:
    """How layers are compiled: by torch.compile with these options, or as a whole model was that is now in parts."""

    options: Mapping[str, Any]
    context: Callable[[Any], Any] | None = dataclasses.field(default=None, repr=False)
    cuts: bool = dataclasses.field(default=False, repr=False)

    def __call__(self, layer: Any) -> Any:
        made = torch.compile(layer, **self.options) if self.context is None else self.context(layer)
        return cut(made) if self.cuts else made

    @functools.cached_property
    def cutting(self) -> "Compiler":
        """The same, for layers whose weight gradients wait."""
        return dataclasses.replace(self, cuts=True)


def compiler_of(asked: bool | Mapping[str, Any]) -> Compiler | None:
    """What an option `compile` asks for."""
    return None if asked is False else Compiler({} if asked is True else dict(asked))


def uncompiled(model: Any) -> tuple[Any, Compiler | None]:
    """The model that torch.compile was given, with the names it had, and what compiled it. It compiles its layers, one
    by one: as a whole it can't be cut.
    """
    if is_optimized(model):
        return model._orig_mod, Compiler({}, model.dynamo_ctx)
    return model, None


def is_optimized(module: Any) -> bool:
    """Whether torch.compile made it from a module."""
    return type(module).__module__ == "torch._dynamo.eval_frame" and isinstance(module, nn.Module)


def cut(layer: Any) -> Any:
    """A compiled layer with the two parts of its backward apart. One with hooks of its own stays as it is."""
    if not is_optimized(layer) or any(getattr(layer, name) for name in _HOOKS):
        return layer
    context = layer.dynamo_ctx
    backend = torch._dynamo.eval_frame.innermost_backend(context.callback)
    fullgraph = getattr(context, "fullgraph", False)
    return torch.compile(layer._orig_mod, backend=Cutting(backend), dynamic=context._dynamic, fullgraph=fullgraph)


def undeferred(layers: Sequence[Any], waited: Collection[int]) -> list[int]:
    """Which compiled layers have a matrix that is not among those parameters, by id, whose gradients have waited."""
    modules = [(number, each) for number, each in enumerate(layers) if isinstance(each, nn.Module)]
    matrices = [(number, each) for number, module in modules for each in module.parameters() if each.dim() > 1]
    found = dict.fromkeys(number for number, each in matrices if each.requires_grad and id(each) not in waited)
    return [number for number in found if is_compiled(layers[number])]


def compiled(
    layers: Sequence[Callable[..., Any]], compiler: Compiler | None, *, split: bool = False
) -> list[Callable[..., Any]]:
    """The layers, each compiled by itself if there is a compiler; `split`: their weight gradients are to wait.

    By itself, because then the bits do not depend on where the model is cut, every layer draws from its own seed, and
    layers of one kind are compiled once. Of a traced model the pieces are compiled, between their draws.
    """
    layers = [cut(layer) for layer in layers] if split else list(layers)
    if compiler is None:
        return layers
    compiler = compiler.cutting if split else compiler
    traced: list[Any] = [layer for layer in layers if is_traced(layer)]
    for layer in traced:
        layer.compiler = compiler
    return [layer if is_compiled(layer) else compiler(layer) for layer in layers]
