"""Batch norms inside torch.utils.checkpoint in traced models: their statistics are a plain loop's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gapless
from gapless.errors import ConfigError, PartitionError
from tests.pipelines import assert_same_gradients


class Norms(nn.Module):
    def __init__(self, middle: Callable[[Norms, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.outer, self.inner, self.plain, self.middle = *(nn.BatchNorm1d(6) for _ in range(3)), middle

    def forward(self, x: Tensor) -> Any:
        return self.c(self.middle(self, self.plain(self.a(x))))


def once(model: Norms, x: Tensor) -> Any:
    return checkpoint(lambda x: model.outer(model.b(x)), x, use_reentrant=False)


def both(model: Norms, x: Tensor) -> Any:
    return checkpoint(lambda x: model.outer(model.inner(model.b(x))), x, use_reentrant=False)


def nested(model: Norms, x: Tensor) -> Any:
    def outer(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda x: model.inner(model.b(x)), x, use_reentrant=False)
        return torch.tanh(model.outer(y))

    return checkpoint(outer, x, use_reentrant=False)


def used_twice(model: Norms, x: Tensor) -> Any:
    return once(model, torch.tanh(once(model, x)))


def without_gradients(model: Norms, x: Tensor) -> Any:
    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = model.inner(x)
        out: Tensor = model.outer(model.b(x) + y)
        return out

    return checkpoint(run, x, use_reentrant=False)


def assert_plain(middle: Any, **options: Any) -> None:
    torch.manual_seed(0)
    model = Norms(middle)
    reference, x, y = copy.deepcopy(model), torch.randn(2, 8, 6), torch.randn(2, 8, 6)
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss, intra_op_threads=1, **options) as pipe:
        for step in range(2):
            pipe.step(x[step], y[step])
    for step in range(2):
        for part, goal in zip(x[step].chunk(4), y[step].chunk(4), strict=True):
            (F.mse_loss(reference(part), goal) / 4).backward()
    assert model.outer.num_batches_tracked is not None
    for (name, ours), other in zip(model.named_buffers(), reference.buffers(), strict=True):
        assert torch.equal(ours, other), (name, ours, other)
    assert_same_gradients(model, reference)


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b"},
        {"schedule": "zb-h1"},
        {"schedule": "gpipe", "remat": "stage"},
        {"schedule": "1f1b", "remat": "layer"},
        {"schedule": "1f1b", "compile": {"backend": "aot_eager"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("middle", [once, both])
def test_statistics_move_as_often_as_in_the_plain_loop(middle: Any, options: dict[str, Any]) -> None:
    """They moved once for each microbatch, and in the plain loop once more for each checkpoint."""
    assert_plain(middle, **options)


def test_deferred_statistics_move_once() -> None:
    model, x, y = Norms(once), torch.randn(8, 6), torch.randn(8, 6)
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss, batchnorm="deferred") as pipe:
        pipe.step(x, y)
    assert model.outer.num_batches_tracked == model.plain.num_batches_tracked == 1


@pytest.mark.parametrize(
    ("middle", "kind", "message"),
    [
        (
            used_twice,
            ConfigError,
            r"a batch norm inside torch\.utils\.checkpoint is used twice in one forward, .*: give",
        ),
        (
            without_gradients,
            PartitionError,
            r"a batch norm inside .* another grad mode .*: take it out of the check",
        ),
        (
            nested,
            PartitionError,
            r"a batch norm inside two torch\.utils\.checkpoint, .*: take it out of the checkpoint",
        ),
    ],
)
def test_what_can_t_be_exact_is_refused(middle: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        assert_plain(middle)
