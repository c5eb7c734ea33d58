"""An optimizer that steps in a hook of the backward, as torch's tutorial has it: the loop's bits, or a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.errors import ConfigError
from tests.random_models.blocks import Do
from tests.stage.state_loops import Clock, Made, assert_same_as_loop, batches, linear

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-v")
SEVERAL = r"a hook has changed a weight of stage \d .* while other microbatches are computed with it: step .* after"


def stepped(model: nn.Module, when: Callable[[], bool] = lambda: True) -> None:
    """Each weight by an optimizer of its own."""
    for weight in model.parameters():
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

        def step(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            if when():
                optimizer.step()
                optimizer.zero_grad()

        weight.register_post_accumulate_grad_hook(step)


def model_of(clock: Clock, when: Callable[[Clock], bool] = lambda _: True) -> Made:
    shared = linear()
    twice = Do(lambda part, x: part(part(x).tanh()) * part.weight.mean(), shared)
    layers = [linear(), nn.LayerNorm(6), Do(lambda part, x: part(x), linear()), nn.Tanh(), twice, nn.Dropout(0.2)]
    stepped(nn.ModuleList(layers), lambda: when(clock))
    return [*layers, linear()], F.mse_loss


@pytest.mark.parametrize(("schedule", "remat"), zip(SCHEDULES, ["none", "stage", "layer", "none"], strict=True))
def test_with_one_microbatch_an_optimizer_may_step_in_the_backward(schedule: str, remat: str) -> None:
    assert_same_as_loop(model_of, microbatches=1, schedule=schedule, remat=remat)


def test_so_it_may_where_every_backward_comes_before_the_next_forward() -> None:
    assert_same_as_loop(model_of, devices=1)


@pytest.mark.parametrize(("schedule", "begins"), zip(SCHEDULES, [0, 3, 3, 0], strict=True))
def test_with_several_it_is_refused_in_the_step_in_which_it_begins(schedule: str, begins: int) -> None:
    steps = []

    def when(clock: Clock) -> bool:
        steps.append(clock.step)
        return clock.step >= begins

    with pytest.raises(ConfigError, match=SEVERAL):
        assert_same_as_loop(lambda clock: model_of(clock, when), schedule=schedule)
    assert steps[-1] == begins


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_hooks_that_only_read_go_on_beside_weights_that_a_forward_changes(remat: str) -> None:
    def make(clock: Clock) -> Made:
        seen: list[float] = []
        layers = [linear(), nn.LayerNorm(6), linear(), linear()]
        for weight in nn.ModuleList(layers).parameters():
            weight.register_hook(lambda grad: seen.append(float(grad.sum())))
            weight.register_post_accumulate_grad_hook(lambda weight: seen.append(float(weight.sum())))
        if remat == "none":
            table = nn.Embedding(10, 6, max_norm=1.0)
            table.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(float(weight.sum())))
            layers.insert(1, Do(lambda part, x: x + part((x > 0).long()[:, 0]), table))
        return layers, F.mse_loss

    assert_same_as_loop(make, remat=remat)


def test_an_optimizer_that_waits_for_the_last_microbatch_may_step_in_its_backward() -> None:
    def make(clock: Clock) -> Made:
        layers = [linear(), linear(), linear()]
        for weight in nn.ModuleList(layers).parameters():
            optimizer, calls = torch.optim.SGD([weight], lr=0.1), list[Any]()

            def step(_: Tensor, optimizer: Any = optimizer, calls: list[Any] = calls) -> None:
                calls.append(None)
                if len(calls) % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()

            weight.register_post_accumulate_grad_hook(step)
        return layers, F.mse_loss

    assert_same_as_loop(make, optimize=False)


def test_a_weight_of_two_stages_still_says_that_it_has_a_hook() -> None:
    shared = linear()
    model = nn.Sequential(shared, nn.Tanh(), nn.Tanh(), shared)
    stepped(model)
    refused = pytest.raises(ConfigError, match="is shared by several stages and has a hook")
    with gapless.Pipeline(model, devices=2, microbatches=1, loss=F.mse_loss) as pipe, refused:
        pipe.step(*batches()[0])
