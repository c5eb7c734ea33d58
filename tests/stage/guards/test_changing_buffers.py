"""Buffers that a forward changes are changed once for each microbatch, also where it runs again for remat."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import gapless
from tests.by_hand import seeded_loop
from tests.pipelines import assert_same, assert_same_gradients
from tests.stage.state_loops import assert_same_as_loop


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


def assert_exact(make: Callable[[], Sequence[nn.Module]], **options: Any) -> None:
    assert_same_as_loop(lambda clock: (make(), F.mse_loss), steps=3, **options)


@pytest.mark.parametrize(
    ("schedule", "remat"), [("gpipe", "none"), ("1f1b", "layer"), ("zb-h1", "stage"), ("zb-v", "layer")]
)
def test_a_moving_average_moves_once_for_each_microbatch(schedule: str, remat: str) -> None:
    assert_exact(lambda: [Average() for _ in range(4)], schedule=schedule, remat=remat)


@pytest.mark.parametrize("remat", ["stage", "layer"])
def test_a_spectral_norm_is_repeated_from_the_vectors_it_started_from(remat: str) -> None:
    assert_exact(lambda: [spectral_norm(nn.Linear(6, 6)) for _ in range(4)], remat=remat)


def test_a_batch_norm_in_a_compiled_layer_counts_once() -> None:
    def make() -> list[Any]:
        layers = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2)]
        return [torch.compile(layer, backend="aot_eager") for layer in layers]

    assert_exact(make, schedule="gpipe", remat="stage")


class Counting(nn.Module):
    """Shifts by a table, and counts its calls in a buffer that others may have too."""

    counter: Tensor
    table: Tensor

    def __init__(self, counter: Tensor, *, counts: bool) -> None:
        super().__init__()
        self.register_buffer("counter", counter)
        self.register_buffer("table", torch.linspace(0.0, 1.0, 6))
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.counter += 1
        return x + self.table * self.counter


def norm_twice() -> list[nn.Module]:
    norm = nn.BatchNorm1d(6)
    return [nn.Linear(6, 6), norm, nn.Linear(6, 6), norm, nn.Linear(6, 6)]


def counted_twice() -> list[nn.Module]:
    counter = torch.zeros(())
    return [nn.Linear(6, 6), Counting(counter, counts=True), nn.Linear(6, 6), Counting(counter, counts=True)]


@pytest.mark.parametrize(
    ("make", "name"), [(norm_twice, "1.num_batches_tracked|1.running_"), (counted_twice, "1.counter")]
)
def test_a_buffer_that_two_stages_change_is_refused(make: Any, name: str) -> None:
    """It was changed in the order in which the stages happened to run."""
    message = rf"several stages have the buffer ({name}).* and change it, .*: choose a partition that keeps its layers"
    with (
        gapless.Pipeline(make(), devices=2, microbatches=4, loss=F.mse_loss, intra_op_threads=1) as pipe,
        pytest.raises(gapless.GaplessError, match=message),
    ):
        pipe.step(torch.randn(8, 6), torch.randn(8, 6))


def read_twice() -> list[nn.Module]:
    reading = Counting(torch.ones(()), counts=False)
    return [nn.Linear(6, 6), reading, nn.Linear(6, 6), reading]


def norm_twice_in_eval_mode() -> list[nn.Module]:
    return [layer.eval() for layer in norm_twice()]


@pytest.mark.parametrize("make", [read_twice, norm_twice_in_eval_mode])
def test_a_buffer_that_two_stages_only_read_is_exact(make: Any) -> None:
    assert_exact(make)


class InCheckpoint(Average):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(lambda x: torch.tanh(super(InCheckpoint, self).forward(x)), x, use_reentrant=False)


@pytest.mark.parametrize("remat", ["none", "stage"])
def test_a_buffer_that_a_recompute_changes_too_late_is_refused(remat: Any) -> None:
    """A backward changed it after forwards of later microbatches, which a plain loop never does."""
    layers = [InCheckpoint(), nn.Linear(6, 6)]
    with (
        gapless.Pipeline(layers, devices=2, microbatches=4, loss=F.mse_loss, remat=remat, intra_op_threads=1) as pipe,
        pytest.raises(gapless.GaplessError, match=r"a backward of stage 0 uses .* or use remat="),
    ):
        pipe.step(torch.randn(8, 6), torch.randn(8, 6))


@pytest.mark.parametrize("remat", ["none", "stage"])
def test_a_weight_that_a_forward_changes_may_not_be_computed_with_again(remat: Any) -> None:
    """An embedding with max_norm shrinks what it reads, and then sometimes once more by a bit."""
    model = nn.Sequential(nn.Embedding(10, 6, max_norm=1.0), nn.Linear(6, 6))
    reference, x, y = copy.deepcopy(model), torch.randint(10, (16,)), torch.randn(16, 6)
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss, remat=remat, intra_op_threads=1) as pipe:
        if remat == "stage":
            with pytest.raises(
                gapless.GaplessError, match=r"a weight of stage 0 was changed in the middle .* max_norm"
            ):
                pipe.step(x, y)
            return
        pipe.step(x, y)
    seeded_loop(reference, x, y)
    assert_same_gradients(model, reference, "gradients")
    assert_same(model.state_dict(), reference.state_dict(), "weights")
