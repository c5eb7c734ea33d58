"""What a forward does behind autograd's back is exact, or refused in the step in which it happens."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.errors import ConfigError
from tests.stage.state_loops import assert_same_as_loop

Change = Callable[["Changing", Tensor], Tensor]


class Changing(nn.Module):
    scale: Tensor

    def __init__(self, forward: Change) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.slow = nn.Parameter(torch.randn(6), requires_grad=False)
        self.register_buffer("scale", torch.ones(6))
        self._own = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._own(self, x)


def _shrinks(layer: Changing, x: Tensor) -> Tensor:
    layer.linear.weight.data.mul_(0.95)
    return torch.tanh(layer.linear(x))


def _shrinks_without_grad(layer: Changing, x: Tensor) -> Tensor:
    with torch.no_grad():
        layer.linear.weight.mul_(0.95)
    return torch.tanh(layer.linear(x))


def _sets(layer: Changing, x: Tensor) -> Tensor:
    layer.linear.weight.data = layer.linear.weight.data * 0.95
    return torch.tanh(layer.linear(x))


def _shrinks_its_scale(layer: Changing, x: Tensor) -> Tensor:
    layer.scale.data.mul_(0.9)
    return torch.tanh(layer.linear(x) * layer.scale)


def _shrinks_and_clones(layer: Changing, x: Tensor) -> Tensor:
    layer.linear.weight.data.mul_(0.95)
    return torch.tanh(F.linear(x, layer.linear.weight.clone(), layer.linear.bias))


def _reads(layer: Changing, x: Tensor) -> Tensor:
    return torch.tanh(layer.linear(x) / layer.linear.weight.data.norm() + layer.scale.data.sum())


def _counts(layer: Changing, x: Tensor) -> Tensor:
    """A moving average of the output, which autograd needs nowhere."""
    y = torch.tanh(layer.linear(x) - layer.scale)
    layer.scale.data.mul_(0.9).add_(y.data.mean(0), alpha=0.1)
    return y


def _follows(layer: Changing, x: Tensor) -> Tensor:
    """A momentum encoder, whose weights learn from others."""
    layer.slow.data = layer.slow.data * 0.9 + layer.linear.bias.data * 0.1
    return torch.tanh(layer.linear(x) + layer.slow)


def _adds_a_local_loss(layer: Changing, x: Tensor) -> Tensor:
    (layer.linear(x.detach()) ** 2).mean().mul(0.1).backward()
    return torch.tanh(layer.linear(x))


def _calls_torchs_backward(layer: Changing, x: Tensor) -> Tensor:
    torch.autograd.backward([(layer.linear(x.detach()) ** 2).mean()])
    return torch.tanh(layer.linear(x))


def _goes_back_to_its_input(layer: Changing, x: Tensor) -> Tensor:
    if x.requires_grad:
        (x**2).mean().backward(retain_graph=True)
    return torch.tanh(layer.linear(x))


def _searches(layer: Changing, x: Tensor) -> Tensor:
    """Gradients that are the layer's own affair: of a tensor, of a copy of its weights, and by torch.autograd.grad."""
    point, inner = x.detach().requires_grad_(), copy.deepcopy(layer.linear)
    (layer.linear(point) ** 2).sum().backward(inputs=[point])
    (inner(x.detach()) ** 2).sum().backward()
    (slope,) = torch.autograd.grad((layer.linear(point) ** 2).sum(), [point])
    assert point.grad is not None
    assert inner.weight.grad is not None
    return torch.tanh(layer.linear(x) + 0.1 * point.grad + 0.01 * slope + inner.weight.grad.mean())


def _assert_exact(forward: Change, **options: Any) -> None:
    assert_same_as_loop(lambda clock: ([Changing(forward) for _ in range(4)], F.mse_loss), steps=2, **options)


SCHEDULES = pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])


def _each(*forwards: Change) -> pytest.MarkDecorator:
    """Under every schedule, with remat and without, in turn."""
    ways = itertools.product(("none", "stage"), ("gpipe", "1f1b", "zb-h1"))
    return pytest.mark.parametrize(
        ("forward", "remat", "schedule"), [(forwards[n % len(forwards)], *way) for n, way in enumerate(ways)]
    )


@_each(_shrinks, _shrinks_without_grad, _sets, _sets, _shrinks)
def test_a_weight_that_a_forward_changes_and_a_backward_needs_is_refused(
    forward: Change, remat: str, schedule: str
) -> None:
    with pytest.raises(ConfigError, match=r"changed in place since its .*clone\(\)|changed in the middle of a"):
        _assert_exact(forward, remat=remat, schedule=schedule)


@SCHEDULES
def test_a_buffer_that_a_forward_changes_through_data_and_a_backward_needs_is_refused(schedule: str) -> None:
    with pytest.raises(ConfigError, match=r"of stage . for microbatch . needs a tensor .* a clone\(\) of it"):
        _assert_exact(_shrinks_its_scale, schedule=schedule)


@SCHEDULES
@pytest.mark.parametrize("forward", [_shrinks_and_clones, _follows])
def test_a_weight_that_a_forward_changes_and_no_backward_needs_is_exact(forward: Change, schedule: str) -> None:
    _assert_exact(forward, schedule=schedule)


@_each(_reads, _counts, _searches, _searches, _reads, _counts)
def test_data_that_is_read_and_gradients_of_a_layers_own_are_exact(forward: Change, remat: str, schedule: str) -> None:
    _assert_exact(forward, remat=remat, schedule=schedule)


@pytest.mark.parametrize("forward", [_shrinks, _sets, _shrinks_its_scale])
def test_with_one_microbatch_a_change_before_the_use_is_exact(forward: Change) -> None:
    _assert_exact(forward, microbatches=1)


def test_a_change_is_seen_on_one_device_too_and_in_later_steps() -> None:
    layer = Changing(_reads)
    layers = [nn.Linear(6, 6), layer]
    with gapless.Pipeline(layers, devices=1, microbatches=4, loss=F.mse_loss, schedule="gpipe") as pipe:
        for _ in range(3):
            pipe.step(torch.randn(8, 6), torch.randn(8, 6))
        layer._own = _shrinks
        with pytest.raises(ConfigError, match="changed in place since"):
            pipe.step(torch.randn(8, 6), torch.randn(8, 6))


@_each(_adds_a_local_loss, _calls_torchs_backward, _goes_back_to_its_input, _goes_back_to_its_input)
def test_a_backward_in_a_forward_that_adds_to_gradients_of_the_stage_is_refused(
    forward: Change, remat: str, schedule: str
) -> None:
    with pytest.raises(ConfigError, match=r"calls backward\(\) in a forward, .* gapless\.aux_loss instead"):
        _assert_exact(forward, remat=remat, schedule=schedule)
