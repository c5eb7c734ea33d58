"""A model without weights gives the graph of a real one, node for node, and is as it was afterwards."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from gapless.model.materialise import release
from gapless.model.traced.capture import Captured
from tests.hf.models import batch_of, model_of
from tests.model.hub import hub

CPU = torch.device("cpu")


class Convolutions(nn.Module):
    """Layouts that are not torch's usual one, a batch norm, weights that are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(8)
        self.last = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.last.weight
        self.register_buffer("scale", torch.ones(8, 1).expand(8, 4)[:, 0])

    def forward(self, x: Any) -> Any:
        h = torch.relu(self.norm(self.first(x))).mean((2, 3))
        return self.again(torch.relu(self.last(h))) * self.scale


def written(model: nn.Module, batch: Any) -> list[str]:
    captured = Captured(model, [CPU, CPU])
    captured.prepare([batch])
    nodes = captured.edition.traces[0][1].graph.nodes
    return [f"{node.format_node()} {_laid_out(node.meta.get('val'))}" for node in nodes]


def _laid_out(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, str(tuple(value.shape)), str(value.stride()), value.device, value.requires_grad
    return [_laid_out(each) for each in value] if isinstance(value, list | tuple) else None


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("gpt2", "llama", "bert", "mixtral", "t5")]


@pytest.mark.parametrize("kind", ["convolutions", *SLOW])
def test_the_graph_is_that_of_a_real_model(kind: str) -> None:
    if kind != "convolutions":
        hub()
    make = Convolutions if kind == "convolutions" else partial(model_of, kind)
    batch = torch.randn(2, 3, 5, 5) if kind == "convolutions" else batch_of(kind)
    empty: nn.Module = make()
    release([empty], [])
    held = [*empty.parameters(), *empty.buffers()]
    assert all(each.is_meta for each in held)
    assert written(empty, batch) == written(make(), batch)
    assert all(a is b for a, b in zip([*empty.parameters(), *empty.buffers()], held, strict=True))
    assert all(each.is_meta for each in held)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_trace_has_the_callers_cudnn(enabled: bool) -> None:
    """An export switches it off, and batch norms ran without it ever after."""
    with torch.backends.cudnn.flags(enabled=enabled):
        lines = [line for line in written(Convolutions(), torch.randn(2, 3, 5, 5)) if "batch_norm" in line]
    assert lines
    assert f", {enabled})" in lines[0]
