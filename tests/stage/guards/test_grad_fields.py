"""`.grad` and `.requires_grad` of weights in a forward: the loop's bits, or a word in the very step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gapless.errors import ConfigError
from tests.random_models.blocks import Do
from tests.stage.state_loops import Clock, Made, assert_same_as_loop, linear

SCHEDULES = ("gpipe", "1f1b", "zb-h1")
When = Callable[[Clock, Tensor], bool]
WHEN: dict[str, When] = {
    "always": lambda clock, x: True,
    "from step 3 on": lambda clock, x: clock.step >= 3,
    "by the data": lambda clock, x: clock.step > 0 and bool(x.mean() > 0),
}


def around(middle: nn.Module) -> list[nn.Module]:
    return [linear(), middle, nn.Tanh(), linear(), linear()]


def thawed(clock: Clock, when: When) -> Made:
    def forward(part: nn.Linear, x: Tensor) -> Tensor:
        part.weight.requires_grad_(not when(clock, x))
        return part(x)  # type: ignore[no-any-return]

    return around(Do(forward, linear())), F.mse_loss


def flipped(clock: Clock, when: When) -> Made:
    def forward(part: nn.Linear, x: Tensor) -> Tensor:
        if when(clock, x):
            part.weight.requires_grad = not part.weight.requires_grad
        return part(x)  # type: ignore[no-any-return]

    return around(Do(forward, linear())), F.mse_loss


def clamped(clock: Clock, when: When) -> Made:
    def forward(part: nn.Linear, x: Tensor) -> Tensor:
        if when(clock, x) and part.weight.grad is not None:
            part.weight.grad.clamp_(-0.01, 0.01)
        return part(x)  # type: ignore[no-any-return]

    return around(Do(forward, linear())), F.mse_loss


def read(clock: Clock, when: When) -> Made:
    def forward(part: nn.Linear, x: Tensor) -> Tensor:
        known = part.weight.grad if when(clock, x) else None
        return part(x) * (1 if known is None else 1 + known.norm())  # type: ignore[no-any-return]

    return around(Do(forward, linear())), F.mse_loss


def taken_away(clock: Clock, when: When) -> Made:
    def forward(part: nn.Linear, x: Tensor) -> Tensor:
        if when(clock, x):
            part.weight.grad = None
        return part(x)  # type: ignore[no-any-return]

    return around(Do(forward, linear())), F.mse_loss


def read_by_the_loss(clock: Clock, when: When) -> Made:
    layers = around(linear())
    weights = list(nn.ModuleList(layers).parameters())

    def loss(out: Tensor, target: Tensor) -> Tensor:
        value = F.mse_loss(out, target)
        if not when(clock, target):
            return value
        return value * (1 + sum(float(each.grad.norm()) for each in weights if each.grad is not None))

    return layers, loss


FROZEN = r"a forward has frozen or unfrozen a weight of shape \(6, 6\) with requires_grad_"
GRAD = r"reads \.grad of a weight of shape"
Habit = Callable[[Clock, When], Made]
HABITS: dict[Habit, str] = {
    thawed: FROZEN,
    flipped: FROZEN,
    clamped: GRAD,
    read: GRAD,
    taken_away: GRAD,
    read_by_the_loss: GRAD,
}


@pytest.mark.parametrize(("habit", "schedule"), zip(HABITS, SCHEDULES * 2, strict=True))
def test_with_one_microbatch_all_of_it_is_exact(habit: Habit, schedule: str) -> None:
    assert_same_as_loop(lambda clock: habit(clock, WHEN["by the data"]), microbatches=1, schedule=schedule)


@pytest.mark.in_pairs
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_several_it_is_refused_in_the_step_in_which_it_begins(schedule: str, habit: Habit, when: str) -> None:
    asked: list[int] = []

    def noted(clock: Clock, x: Tensor) -> bool:
        asked.append(clock.step)
        return WHEN[when](clock, x)

    if habit is thawed and when != "by the data":  # all microbatches of a step do the same
        assert_same_as_loop(lambda clock: habit(clock, noted), schedule=schedule)
        return
    with pytest.raises(ConfigError, match=HABITS[habit]):
        assert_same_as_loop(lambda clock: habit(clock, noted), schedule=schedule)
    assert asked[-1] in {"always": [0], "from step 3 on": [3], "by the data": [1, 2]}[when]


def test_a_recompute_does_not_switch_a_weight_back() -> None:
    with pytest.raises(ConfigError, match=FROZEN):
        assert_same_as_loop(lambda clock: flipped(clock, WHEN["always"]), microbatches=1, remat="layer")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_weight_that_is_frozen_for_a_part_of_a_forward_is_exact(schedule: str) -> None:
    def make(clock: Clock) -> Made:
        def forward(part: nn.Linear, x: Tensor) -> Tensor:
            part.requires_grad_(False)
            fixed = part(x)
            part.requires_grad_(True)
            return part(x) + fixed  # type: ignore[no-any-return]

        return around(Do(forward, linear())), F.mse_loss

    assert_same_as_loop(make, schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_weight_that_a_forward_has_made_may_have_a_gradient(schedule: str) -> None:
    def make(clock: Clock) -> Made:
        def forward(part: nn.Linear, x: Tensor) -> Tensor:
            found = nn.Parameter(torch.ones(6))
            (x.detach() * found).square().mean().backward()
            assert found.grad is not None
            return part(x * found.grad)  # type: ignore[no-any-return]

        return around(Do(forward, linear())), F.mse_loss

    assert_same_as_loop(make, schedule=schedule)
