"""Layers and losses that call functions which torch.compile has compiled, beside layers of other threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from tests.by_hand import seeded_loop
from tests.pipelines import assert_same_gradients

SEED = 3


class Helped(nn.Module):
    def __init__(self, helper: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.drop, self.helper = nn.Linear(6, 6), nn.Dropout(0.3), helper

    def forward(self, x: Tensor) -> Any:
        return self.drop(self.helper(self.linear(x)))


@pytest.mark.parametrize(
    ("backend", "schedule", "remat"), [("eager", "zb-h1", "none"), ("aot_eager", "gpipe", "stage")]
)
def test_a_compiled_helper_of_layers_and_loss_is_that_of_the_plain_loop(
    backend: str, schedule: str, remat: Any
) -> None:
    """Dynamo saves torch's settings and sets them as they were, which was refused as if the layer had set them."""

    def layers() -> list[nn.Module]:
        torch.compiler.reset()
        torch.manual_seed(1)
        helper = torch.compile(lambda x: torch.tanh(x) * 2, backend=backend)
        return [Helped(helper), nn.Dropout(0.2), Helped(helper), nn.Linear(6, 6)]

    def loss() -> Callable[[Tensor, Tensor], Tensor]:
        squares = torch.compile(lambda out, y: (out - y).square(), backend=backend)
        return lambda out, y: squares(out, y).mean()

    x, y = torch.randn(8, 6), torch.randn(8, 6)
    plain, criterion, expected = layers(), loss(), list[Tensor]()
    for step in range(2):
        expected += seeded_loop(plain, x, y, loss=criterion, seed=SEED, step=step)
    ours, losses = layers(), list[Tensor]()
    with gapless.Pipeline(
        ours, devices=2, schedule=schedule, remat=remat, microbatches=4, loss=loss(), seed=SEED, intra_op_threads=1
    ) as pipe:
        for _ in range(2):
            losses += pipe.step(x, y).losses
    assert [*map(float, losses)] == [*map(float, expected)]
    assert_same_gradients(ours, plain)


def test_a_compiled_helper_may_not_set_what_all_threads_share() -> None:
    @torch.compile(backend="eager")
    def helper(x: Tensor) -> Tensor:
        torch.use_deterministic_algorithms(True)
        return x * 2

    model = [Helped(helper), nn.Linear(6, 6)]
    with (
        gapless.Pipeline(model, devices=2, microbatches=2, loss=F.mse_loss) as pipe,
        pytest.raises(Exception, match="calls set_deterministic_algorithms in its forward"),
    ):
        pipe.step(torch.randn(4, 6), torch.randn(4, 6))
    assert not torch.are_deterministic_algorithms_enabled()
