"""Weights of other stages that a loss or a layer begins to use later, or now and then: each was off until the next look
at the graph, some steps on. All are compared with the loop that a user would write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gapless
from gapless.errors import ConfigError
from tests.by_hand import loop
from tests.stage.state_loops import Clock, Made, assert_same_as_loop, linear

from .random_models.blocks import Do, Twice
from .test_hidden_uses import CAST, assert_exact

WIDTH, SAMPLES, MICROBATCHES = 6, 7, 3
When = Callable[[int, int], bool]  # a step and a microbatch


def late_penalty(clock: Clock, when: When) -> Made:
    """On all weights."""
    layers = [linear(), nn.LayerNorm(WIDTH), linear(), linear()]
    weights = list(nn.ModuleList(layers).parameters())

    def loss(out: Tensor, target: Tensor) -> Tensor:
        plain = F.mse_loss(out, target)
        if not when(clock.step, int(target[0, 0])):
            return plain
        return plain + 0.01 * torch.stack([weight.square().sum() for weight in weights[:4]]).sum()

    return layers, loss


def another_penalty_each_time(clock: Clock, when: When) -> Made:
    """Graphs of the same size, of which each uses another weight."""
    layers = [linear(), nn.LayerNorm(WIDTH), linear(), linear()]
    weights = list(nn.ModuleList(layers).parameters())[:4]

    def loss(out: Tensor, target: Tensor) -> Tensor:
        number = clock.step + int(target[0, 0])
        return F.mse_loss(out, target) + 0.01 * weights[number % len(weights)].square().sum()

    return layers, loss


def by_the_coin(clock: Clock, when: When) -> bool:
    return when(clock.step, int(torch.rand(()) * MICROBATCHES))


def a_weight_of_the_stage_before(clock: Clock, when: When) -> Made:
    first = linear()
    hidden = Do(lambda part, x: part(x) + F.linear(x, first.weight) if by_the_coin(clock, when) else part(x), linear())
    return [first, nn.Tanh(), hidden, linear()], F.mse_loss


def a_weight_of_the_stage_behind(clock: Clock, when: When) -> Made:
    last = linear()
    hidden = Do(lambda part, x: part(x) + F.linear(x, last.weight) if by_the_coin(clock, when) else part(x), linear())
    return [hidden, nn.Tanh(), linear(), last], F.mse_loss


def two_weights_that_change_places(clock: Clock, when: When) -> Made:
    one, other = linear(), linear()

    def pick(first: nn.Linear, second: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, (second if by_the_coin(clock, when) else first).weight)

    return [Do(lambda x: pick(one, other, x)), one, nn.Tanh(), Do(lambda x: pick(other, one, x)), other], F.mse_loss


@pytest.mark.parametrize(
    "when",
    [lambda step, _: step >= 3, lambda step, _: step % 3 == 2, lambda step, microbatch: step > 1 and microbatch == 1],
    ids=["from a step on", "every third step", "in some microbatches"],
)
@pytest.mark.parametrize(
    "make",
    [
        late_penalty,
        another_penalty_each_time,
        a_weight_of_the_stage_before,
        a_weight_of_the_stage_behind,
        two_weights_that_change_places,
    ],
)
def test_a_use_that_begins_later_is_exact_in_the_step_in_which_it_begins(make: Any, when: When) -> None:
    ways: list[dict[str, Any]] = [{"schedule": "1f1b"}, {"schedule": "zb-h1"}, {"schedule": "zb-v", "remat": "stage"}]
    for options in ways:
        if options["schedule"] == "zb-v" and make is not a_weight_of_the_stage_behind:
            continue  # once is enough
        assert_same_as_loop(lambda clock: make(clock, when), microbatches=MICROBATCHES, numbered=True, **options)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_hidden_use_under_autocast_shares_the_cast_in_the_step_in_which_it_is_found(schedule: str) -> None:
    """It did from the next step on: gradients met after the cast, off by 1e-4."""

    def make() -> list[Any]:
        first = linear()
        return [first, nn.Tanh(), Do(lambda part, x: part(x) + F.linear(x, first.weight), linear()), linear()]

    assert_exact(make, schedule=schedule, context=CAST)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("when", [lambda step: step > 0, lambda step: step % 3 == 2])
def test_a_weight_that_is_cast_between_two_uses_as_it_is(schedule: str, when: Callable[[int], bool]) -> None:
    """Autocast's cast was that of the first microbatch, so its gradient came after both others; the weight had waited
    in the steps before.
    """

    def make(clock: Clock) -> Made:
        last = linear()

        def uses(part: nn.Module, x: Tensor) -> Any:
            return part(x) + x * last.weight.mean() if clock.step > 0 else part(x)

        def loss(out: Tensor, target: Tensor) -> Tensor:
            penalty = 0.01 * last.weight.square().sum() if when(clock.step) else 0.0
            return F.mse_loss(out.float(), target) + penalty

        return [linear(), Do(uses, linear()), linear(), last], loss

    assert_same_as_loop(make, schedule=schedule, partition=[1, 3], around=CAST)


def test_a_shared_weight_in_two_reentrant_checkpoints_is_refused() -> None:
    """The second gradient took the place of the first."""
    shared = linear()

    def twice(part: nn.Module, x: Tensor) -> Any:
        return checkpoint(part, checkpoint(part, x, use_reentrant=True), use_reentrant=True)

    layers = [shared, nn.Tanh(), Do(twice, shared), linear()]
    with (
        gapless.Pipeline(layers, devices=2, partition=[2, 2], microbatches=2, loss=F.mse_loss) as pipe,
        pytest.raises(ConfigError, match=r"came twice in one backward.*use_reentrant=False"),
    ):
        pipe.step(torch.randn(4, WIDTH), torch.randn(4, WIDTH))


def test_a_hook_that_begins_to_use_a_weight_of_another_stage() -> None:
    """Graphs of torch's own modules are walked only where their number of nodes is new."""

    def make(clock: Clock) -> Made:
        first, last = linear(), nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        last[0].register_forward_hook(lambda _, args, out: out * first.weight.mean() if clock.step > 2 else None)
        return [first, nn.Tanh(), last], F.mse_loss

    for schedule in ("1f1b", "zb-h1"):
        assert_same_as_loop(make, schedule=schedule)


def test_a_stream_refuses_a_penalty_in_the_minibatch_in_which_it_begins() -> None:
    clock = Clock()
    layers, loss = late_penalty(clock, lambda step, _: step >= 3)
    with gapless.Pipeline(layers, devices=2, schedule="pipedream", microbatches=1, loss=loss) as pipe:
        stream = pipe.stream(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for clock.step in range(5):
                stream.drain()
                yield torch.randn(SAMPLES, WIDTH), torch.zeros(SAMPLES, WIDTH)

        with pytest.raises(ConfigError, match="uses weights of another stage"):
            list(stream.run(batches()))
    assert clock.step == 3


@pytest.mark.parametrize("owner", range(4))
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "v-half"])
def test_under_autocast_a_use_of_some_microbatches_is_exact_or_refused_where_the_backward_is_split(
    schedule: str, owner: int
) -> None:
    """Their gradients meet in one cast, which all microbatches share. The first microbatch is without it."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=number != owner) for number in range(4)]
    weights = [layers[owner].weight]
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    x[:, 0] = torch.tensor([-1.0, -1.0, 1.0, 1.0, 1.0, 1.0, -1.0, -1.0])

    def sometimes(part: nn.Module, h: Tensor) -> Tensor:
        made: Tensor = part(h)
        return made + F.linear(made, weights[0].to(made.dtype)) * 0.1 if h[0, 0] > 0 else made

    model = nn.Sequential(Do(sometimes, layers[0]), *layers[1:])
    with (
        CAST(),
        gapless.Pipeline(
            model, devices=2, schedule=schedule, microbatches=4, loss=F.mse_loss, intra_op_threads=1
        ) as pipe,
    ):
        try:
            pipe.step(x, y)
        except ConfigError as error:
            assert re.search("^under autocast, .*such as 1f1b", str(error))  # noqa: PT017 (or it is exact)
            assert schedule != "1f1b"
            return
    assert owner < 2 or schedule == "1f1b"
    ours = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with CAST():
        loop(model, x, y)
    for mine, parameter in zip(ours, model.parameters(), strict=True):
        assert mine is not None
        assert parameter.grad is not None
        assert torch.equal(mine, parameter.grad)


def test_a_hidden_use_that_leaves_a_graph_as_large_as_it_was_is_found_in_forwards_whose_gradients_wait() -> None:
    """The first microbatch's gradients do not wait, so a walk over its graph alone told nothing."""

    def make(clock: Clock) -> Made:
        def late(part: nn.Module, x: Tensor) -> Any:
            made = part(x)
            return Twice.apply(made, part.weight) if clock.step > 0 else made * 1.5  # type: ignore[no-untyped-call]

        return [linear(), Do(late, linear()), linear(), linear()], F.mse_loss

    assert_same_as_loop(make, schedule="zb-v", partition=[1, 1, 1, 1], steps=3)


def test_a_hidden_use_of_some_microbatches_in_graphs_of_one_size_is_refused() -> None:
    """Its gradient came before the one that waits: other bits."""

    def hidden(part: nn.Module, x: Tensor) -> Any:
        made = part(x)
        return Twice.apply(made, part.weight) if x.mean() > 0 else made * 1.5  # type: ignore[no-untyped-call]

    with pytest.raises(ConfigError, match="in a second way that torch's functions do not show"):
        assert_same_as_loop(
            lambda clock: ([linear(), Do(hidden, linear()), linear(), linear()], F.mse_loss),
            schedule="zb-v",
            partition=[1, 1, 1, 1],
        )
