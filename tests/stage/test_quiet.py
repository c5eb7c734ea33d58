"""Layers that draw nothing run without the mode; one that begins to draw is noticed, and draws what it would have."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

import gapless

SEED, MICROBATCHES = 7, 4


class Mine(nn.Module):
    """A user's layer, of which nothing is known; it draws for some inputs, in its own way."""

    def __init__(self, draws_above: float = 1e9, way: str = "dropout") -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.draws_above, self.way = draws_above, way
        self.modes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(len(_get_current_function_mode_stack()))
        y: Tensor = torch.tanh(self.linear(x))
        if float(x.detach().abs().sum()) > self.draws_above:
            y = F.dropout(y, 0.5) if self.way == "dropout" else y + torch.rand(())
        return y


def plain_steps(model: nn.Sequential, batches: list[Tensor]) -> list[list[Tensor]]:
    """The gradients of each step, as a user would compute them."""
    found = []
    for step, x in enumerate(batches):
        model.zero_grad()
        for number, part in enumerate(x.tensor_split(MICROBATCHES)):
            for index, layer in enumerate(model):
                torch.manual_seed(gapless.seed_of(SEED, step, number, index))
                part = layer(part)
            (part.square().mean() / MICROBATCHES).backward()
        found.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
    return found


def loss(y: Tensor, _: Any) -> Tensor:
    return y.square().mean()


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("way", ["dropout", "rand"])
def test_a_layer_that_begins_to_draw_draws_as_in_the_plain_loop(devices: int, way: str) -> None:
    """It does from the third step on, for two of four microbatches."""
    torch.manual_seed(0)
    model = nn.Sequential(Mine(10, way), Mine(), Mine(), Mine())
    small, large = torch.full((8, 6), 0.1), torch.full((8, 6), 0.1)
    large[2:6] = 1.0
    batches = [small, small, large, small, large]
    reference = plain_steps(copy.deepcopy(model), batches)
    before = torch.get_rng_state()
    with gapless.Pipeline(
        model, devices=devices, microbatches=MICROBATCHES, loss=loss, seed=SEED, schedule="1f1b"
    ) as pipe:
        for step, x in enumerate(batches):
            model.zero_grad()
            pipe.step(x, x)
            ours = [each.grad for each in model.parameters() if each.grad is not None]
            assert all(map(torch.equal, ours, reference[step])), step
    assert torch.equal(torch.get_rng_state(), before)


def test_quiet_layers_leave_the_mode_after_their_first_call() -> None:
    layer = Mine()
    with gapless.Pipeline(nn.Sequential(layer), devices=1, microbatches=2, loss=loss) as pipe:
        for _ in range(3):
            pipe.step(torch.randn(4, 6), torch.zeros(4))
    assert layer.modes[0] > 0
    assert layer.modes[-2:] == [0, 0]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_beside_other_threads_nobody_is_quiet(schedule: str) -> None:
    """Threads share torch's default generators: who has moved them, nobody could tell."""
    torch.manual_seed(0)
    model = nn.Sequential(Mine(0), Mine(), Mine(), Mine(0))
    x = torch.randn(8, 6)
    reference = plain_steps(copy.deepcopy(model), [x] * 4)
    with gapless.Pipeline(model, devices=4, microbatches=MICROBATCHES, loss=loss, seed=SEED, schedule=schedule) as pipe:
        for step in range(4):
            model.zero_grad()
            pipe.step(x, x)
            ours = [each.grad for each in model.parameters() if each.grad is not None]
            assert all(map(torch.equal, ours, reference[step])), step
    assert all(layer.modes[-1] for layer in model if isinstance(layer, Mine))


def test_a_batch_norm_is_always_seen() -> None:
    layer = Mine()
    model = nn.Sequential(layer, nn.BatchNorm1d(6))
    with gapless.Pipeline(model, devices=1, microbatches=2, loss=loss, batchnorm="deferred") as pipe:
        for _ in range(3):
            pipe.step(torch.randn(4, 6), torch.zeros(4))
    assert all(layer.modes)
