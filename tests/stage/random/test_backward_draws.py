"""Draws in a backward: refused in the first step, unless a checkpoint makes them or a generator is the hook's own."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gapless
from gapless.errors import ConfigError
from tests.by_hand import loop
from tests.pipelines import Do, assert_same_gradients


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))


def noisy(grad: Tensor) -> Tensor:
    return grad + 0.01 * torch.randn_like(grad)


class Rounded(torch.autograd.Function):
    """Its backward rounds at random."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.floor(grad * 256 + torch.rand(grad.shape)) / 256


def rounding() -> nn.Module:
    return Do(Rounded.apply)


def hooked(x: Tensor) -> Tensor:
    """A hook on an activation, which drops parts of the gradient."""
    y = x * 2
    y.register_hook(lambda grad: F.dropout(grad, 0.5))
    return y


def on_weight(layers: Any) -> None:
    layers[1][0].weight.register_hook(noisy)


def in_function(layers: Any) -> None:
    layers[1].append(rounding())


def on_activation(layers: Any) -> None:
    layers[1].append(Do(hooked))


def train(layers: nn.Module, steps: int = 1, **options: Any) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    with gapless.Pipeline(layers, devices=2, microbatches=4, loss=F.mse_loss, intra_op_threads=1, **options) as pipe:
        for _ in range(steps):
            pipe.step(x, y)


@pytest.mark.parametrize(("schedule", "remat"), [("1f1b", "none"), ("zb-h1", "layer"), ("zb-h1", "none")])
@pytest.mark.parametrize("draws", [on_weight, in_function, on_activation])
def test_a_draw_in_a_backward_is_refused_in_the_first_step(
    draws: Callable[[Any], None], schedule: str, remat: str
) -> None:
    layers = model()
    draws(layers)
    with pytest.raises(ConfigError, match="draw in the forward and keep what was drawn"):
        train(layers, schedule=schedule, remat=remat)


def test_a_draw_that_a_hook_begins_with_later_is_refused_in_that_step() -> None:
    layers, steps = model(), []

    def hook(grad: Tensor) -> Tensor:
        steps.append(1)
        return noisy(grad) if len(steps) > 4 else grad

    layers[0][0].weight.register_hook(hook)
    with pytest.raises(ConfigError, match="calls randn_like"):
        train(layers, 2)
    assert len(steps) == 5


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_generator_of_each_hooks_own_draws_as_in_the_plain_loop(schedule: str) -> None:
    def noise(layers: Any) -> Any:
        for number, layer in enumerate(layers):
            generator = torch.Generator().manual_seed(number)
            layer[0].weight.register_hook(lambda grad, own=generator: grad + torch.rand(grad.shape, generator=own))
        return layers

    ours, plain = noise(model()), noise(model())
    train(ours, schedule=schedule)
    torch.manual_seed(1)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    loop(plain, x, y)
    assert_same_gradients(ours, plain)


def test_one_generator_in_hooks_of_two_stages_is_refused() -> None:
    layers, generator = model(), torch.Generator()
    for layer in layers:
        layer[0].weight.register_hook(lambda grad: grad + torch.rand(grad.shape, generator=generator))
    with pytest.raises(ConfigError, match="give each hook its own generator"):
        train(layers)


def checkpointed(reentrant: bool) -> nn.Module:
    def inner(linear: nn.Module, x: Tensor) -> Any:
        dropped = F.dropout(linear(x), 0.3)
        return dropped if reentrant else rounding()(dropped)

    return Do(lambda linear, x: checkpoint(inner, linear, x, use_reentrant=reentrant), nn.Linear(6, 6))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_draws_again_in_its_backward(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rounded, "backward", staticmethod(lambda ctx, grad: grad))
    layers = model()
    for layer in list(layers)[:3]:
        layer.append(checkpointed(reentrant))
    plain = copy.deepcopy(layers)
    train(layers)
    torch.manual_seed(1)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    gapless.plain_step(list(plain), x, y, loss=F.mse_loss, microbatches=4)
    assert_same_gradients(layers, plain)


def test_a_thread_of_the_users_own_may_draw_during_a_backward() -> None:
    layers, drawn = model(), []

    def elsewhere(grad: Tensor) -> None:
        thread = threading.Thread(target=lambda: drawn.append(torch.rand(3)))
        thread.start()
        thread.join()

    layers[0][0].weight.register_hook(elsewhere)
    train(layers, 2)
    assert len(drawn) == 8
