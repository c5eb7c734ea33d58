"""Buffers that a forward changes are changed once for each microbatch, also where it runs again for remat."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import gapless
from tests.pipelines import assert_same, assert_same_gradients


class Average(nn.Module):
    """Subtracts a moving average of what it has seen, so that its result depends on its buffers."""

    mean: Tensor

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("table", torch.arange(float(width)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) - self.mean + self.get_buffer("table")
        with torch.no_grad():
            self.mean = self.mean * 0.9 + y.mean(0) * 0.1
            self.get_buffer("seen").add_(1)
        return y


def assert_exact(model: nn.Sequential, reference: nn.Sequential, **options: Any) -> None:
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss, **options) as pipe:
        for step in range(3):
            torch.manual_seed(step)
            x, y = torch.randn(8, 6), torch.randn(8, 6)
            pipe.step(x, y)
            gapless.plain_step(reference, x, y, loss=F.mse_loss, microbatches=4, step=step)
            assert_same_gradients(model, reference, f"step {step}")
            assert_same([*model.buffers()], [*reference.buffers()], f"step {step}, buffers")


@pytest.mark.parametrize("remat", ["none", "stage", "layer"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-v"])
def test_a_moving_average_moves_once_for_each_microbatch(schedule: str, remat: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Average() for _ in range(4)))
    reference = copy.deepcopy(model)
    assert_exact(model, reference, schedule=schedule, remat=remat)
    assert int(model.get_buffer("0.seen")) == 3 * 4


@pytest.mark.parametrize("remat", ["stage", "layer"])
def test_a_spectral_norm_is_repeated_from_the_vectors_it_started_from(remat: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(spectral_norm(nn.Linear(6, 6)) for _ in range(4)))
    reference = copy.deepcopy(model)
    assert_exact(model, reference, schedule="1f1b", remat=remat)


def test_a_batch_norm_in_a_compiled_layer_counts_once() -> None:
    torch.manual_seed(0)

    def compiled(model: nn.Sequential) -> Any:
        layers: list[Any] = [torch.compile(layer, backend="aot_eager") for layer in model]
        return nn.Sequential(*layers)

    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2)))
    reference = copy.deepcopy(model)
    assert_exact(compiled(model), compiled(reference), schedule="gpipe", remat="stage")
    assert int(model.get_buffer("0.1.num_batches_tracked")) == 3 * 4
