"""A traced model whose forward keeps Python state: a trace would keep the value of one batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.errors import PartitionError


class Settings:
    def __init__(self) -> None:
        self.temperature, self.seen = 1.0, list[int]()


class Stateful(nn.Module):
    steps: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind, self.inner = nn.Linear(6, 6), nn.Linear(6, 6), kind, nn.Linear(6, 6)
        self.count, self.seen, self.settings, self.last = 0, list[int](), Settings(), (0, 0)
        self.temperature = 1.0
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "counter":
            self.count += 1
        elif self.kind == "list":
            self.seen.append(1)
        elif self.kind == "object":
            self.settings.temperature *= 0.9
        elif self.kind == "written only":
            self.last = x.shape[0], 6
        elif self.kind == "set once" and self.settings.temperature == 1.0:
            self.settings.temperature = 0.5
        elif self.kind == "buffer":
            self.steps.add_(1)
        factor = (1 + 0.1 * self.count + len(self.seen)) * self.settings.temperature * self.temperature
        x = torch.tanh(self.a(x) * factor)
        out: Tensor = self.b(self.inner(x)) * (1 + self.steps.clone() if self.kind == "buffer" else 1.0)
        return out


def pipeline(model: nn.Module) -> gapless.Pipeline:
    return gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss, intra_op_threads=1)


@pytest.mark.parametrize(("kind", "path"), [("counter", "count"), ("list", "seen"), ("object", "settings.temperature")])
def test_state_that_the_forward_of_a_traced_model_changes_is_refused_and_put_back(kind: str, path: str) -> None:
    """The trace kept the value of the first batch for ever, without a word."""
    model = Stateful(kind)
    with (
        pipeline(model) as pipe,
        pytest.raises(PartitionError, match=rf"the forward of Stateful changes Stateful\.{path}, .* make it a buffer"),
    ):
        pipe.step(torch.randn(8, 6), torch.randn(8, 6))
    assert (model.count, model.seen, model.settings.temperature) == (0, [], 1.0)


def plain(model: Any, x: Tensor, y: Tensor) -> list[list[float]]:
    for part, goal in zip(x.chunk(4), y.chunk(4), strict=True):
        (F.mse_loss(model(part), goal) / 4).backward()
    return [each.grad.tolist() for each in model.parameters()]


@pytest.mark.parametrize("kind", ["none", "written only", "set once"])
def test_what_is_only_read_or_written_or_set_once_does_no_harm(kind: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    ours, theirs = Stateful(kind), Stateful(kind)
    theirs.load_state_dict(ours.state_dict())
    torch.set_num_threads(1)
    with pipeline(ours) as pipe:
        for temperature in (1.0, 0.5):  # a callback of the user's
            ours.temperature = theirs.temperature = temperature
            ours.zero_grad()
            theirs.zero_grad()
            pipe.step(x, y)
            assert [each.grad.tolist() for each in ours.parameters() if each.grad is not None] == plain(theirs, x, y)
    assert ours.settings.temperature == theirs.settings.temperature


def test_a_model_that_can_t_be_cut_for_its_buffer_says_which() -> None:
    class Whole(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            out: Tensor = self.b(torch.tanh(self.a(x * self.count))) * self.count
            self.count.add_(1)
            return out

    with pipeline(Whole()) as pipe, pytest.raises(PartitionError, match="since its forward changes count, whose uses"):
        pipe.step(torch.randn(8, 6), torch.randn(8, 6))
