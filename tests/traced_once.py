"""Traces that are made once: for tests that vary how a traced model is cut and run, and not how it is traced.

A trace takes most of the time of such a test, and depends on the model, its modes, the kind of batch and torch's
settings alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.utils import _pytree as pytree

from gapless.model.traced import settled
from gapless.model.traced.capture import flat_of
from gapless.model.traced.trace import Trace


class Traces:
    """Called in place of `Trace`: gives the one it has of a model that is made alike, if it holds for the batch."""

    def __init__(self) -> None:
        self._known: dict[Any, list[Trace]] = {}

    def __call__(self, model: nn.Module, flat: list[Any], spec: pytree.TreeSpec, **options: Any) -> Trace:
        known = self._known.setdefault(_made_of(model), [])
        for trace in known:
            if trace.fits(flat, spec):
                return trace
        known.append(Trace(model, flat, spec, **options))
        return known[-1]

    def trace(self, model: nn.Module, microbatch: Any) -> None:
        """Before ranks are forked that would all trace it."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(settled, "Trace", self)
            settled.trace_settled(model, *flat_of(microbatch))

    def use(self) -> None:
        """In this process, from now on."""
        vars(settled)["Trace"] = self


def _made_of(model: nn.Module) -> Any:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    homes = {id(tensor): name for name, tensor in reversed(tensors)}  # those of shared ones
    return (
        tuple((name, type(part), part.training, *_settings(part)) for name, part in model.named_modules()),
        tuple((*part._forward_pre_hooks.values(), *part._forward_hooks.values()) for part in model.modules()),
        tuple((name, homes[id(each)], each.shape, each.dtype, each.requires_grad) for name, each in tensors),
    )


def _settings(part: nn.Module) -> list[tuple[str, Callable[..., Any] | str]]:
    """What it was made with: numbers, flags, a config; functions by themselves."""
    own = [(name, value) for name, value in vars(part).items() if not name.startswith("_")]
    return [(name, value if callable(value) else repr(value)) for name, value in own]
