"""Layers that went through torch.compile: nothing in them can be seen, so they are called as they are.

Their weight gradients cannot wait, so they come with the input gradients. What they draw comes from torch's default
generators, which all threads share; and while torch compiles it saves and restores these. So the first call for each
kind of input, the one that compiles, is made alone, with seeded generators, and tells whether numbers were drawn. If
so, all calls for this kind are made that way; if not, they are free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gapless.errors import ConfigError

from . import microbatch as mb
from .autocast import autocast_is_on
from .draws import alone, default_generator


def is_compiled(layer: Any) -> bool:
    """Whether a layer, or a part of it, is compiled: by torch.compile, or in place by its own `compile()`."""
    if not isinstance(layer, nn.Module):
        return hasattr(layer, "_torchdynamo_orig_callable")
    return any(
        type(module).__module__ == "torch._dynamo.eval_frame" or module._compiled_call_impl is not None
        for module in layer.modules()
    )


class CompiledCalls:
    """The calls of one compiled layer."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._draws: dict[Any, bool] = {}  # by kind of input
        self.seconds = 0.0  # of the calls that compiled

    def __call__(self, inputs: Any, seed: int, device: torch.device, call: Callable[[], Any]) -> tuple[Any, bool]:
        """The result, and whether this call may have compiled."""
        kind = self._kind(inputs)
        draws = self._draws.get(kind)
        if draws is False:
            return call(), False
        devices = dict.fromkeys([torch.device("cpu"), device])
        with alone(list(devices)):
            start = time.perf_counter()
            generators = [default_generator(each).manual_seed(seed) for each in devices]
            before = [generator.get_state() for generator in generators]
            result = call()
            moved = [not torch.equal(a, b.get_state()) for a, b in zip(before, generators, strict=True)]
        if draws is None:
            self._draws[kind] = any(moved)
            self.seconds += time.perf_counter() - start
        return result, draws is None

    def _kind(self, inputs: Any) -> Any:
        """What torch may compile anew for."""
        tensors, _ = mb.flatten(inputs)
        shapes = tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad) for tensor in tensors)
        modules = self._layer.modules() if isinstance(self._layer, nn.Module) else ()
        return shapes, torch.is_grad_enabled(), autocast_is_on(), tuple(module.training for module in modules)


def compiled(layers: Sequence[Callable[..., Any]], options: bool | Mapping[str, Any]) -> list[Callable[..., Any]]:
    """The layers, each compiled by itself if `options` (those of torch.compile) ask for it.

    By itself, because then the bits do not depend on where the model is cut, every layer draws from its own seed, and
    layers of one kind are compiled once.
    """
    if options is False:
        return list(layers)
    if any(getattr(layer, "counts_draws", False) for layer in layers):
        raise ConfigError(
            "compile= is for models that are sequences of layers, and this one was traced: give layers= as well."
        )
    return [
        layer if is_compiled(layer) else torch.compile(layer, **({} if options is True else options))
        for layer in layers
    ]
