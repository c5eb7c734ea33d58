"""Parameters, random numbers and buffers that layers use in ways that no module tells of: each was once off in its last
bits or worse, without a word. All are compared with the loop that a user would write.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.errors import ConfigError
from gapless.run.ranks.wire import layout
from gapless.schedule.action import Schedule
from tests.stage.state_loops import Clock, Made, assert_same_as_loop, linear

from .random_models.blocks import Do, scripted_dropout

WIDTH, SAMPLES, MICROBATCHES, SEED = 6, 7, 3, 5
CAST = partial(torch.autocast, "cpu", torch.bfloat16)
Loss = Callable[[Any, Tensor], Tensor]


def assert_exact(
    make: Callable[[], list[Any]],
    *,
    schedule: str | Schedule = "zb-h1",
    loss: Callable[[list[Any]], Loss] = lambda layers: F.mse_loss,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    seed: int = SEED,
    **options: Any,
) -> None:
    """Two steps without zero_grad: gradients and buffers are those of the plain loop."""

    def made(clock: Clock) -> Made:
        layers = make()
        return layers, loss(layers)

    asked: dict[str, Any] = {"microbatches": MICROBATCHES, "steps": 2, "optimize": False, "inner": (4,), **options}
    assert_same_as_loop(made, schedule=schedule, around=context, seed=seed, **asked)


# -- parameters ----------------------------------------------------------------------------------------------------


def used_twice(kind: str) -> list[Any]:
    shared = linear()
    norm = nn.LayerNorm(WIDTH)
    if kind == "cast":
        return [shared, norm, nn.Tanh(), shared]
    direct = Do(lambda part, x: x * part.weight.mean() + x * part.weight.sum(), shared)
    return [direct, shared, nn.Tanh(), norm] if kind == "cast late" else [shared, nn.Tanh(), norm, direct]


@pytest.mark.in_pairs
@pytest.mark.parametrize("remat", ["none", "stage", "layer"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("kind", ["cast", "cast late", "cast early"])
def test_autocast_casts_a_weight_that_two_stages_use_once(kind: str, schedule: str, remat: str) -> None:
    """Each stage had a cast of its own, and the gradients met after it: off by 1e-4."""
    assert_exact(lambda: used_twice(kind), schedule=schedule, context=CAST, remat=remat, partition=[2, 2])


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_weight_used_cast_and_uncast_in_one_stage_adds_up_as_in_plain_training(schedule: str) -> None:
    """Autocast's cast of the first microbatch served all others, so its gradient came last: three terms, other bits."""

    def block() -> nn.Module:
        return Do(lambda part, x: part(x * part.weight.mean() * part.weight.sum()), linear())

    assert_exact(lambda: [block(), nn.Tanh(), block(), block()], schedule=schedule, context=CAST)


class Head(nn.Module):
    """A loss with a weight that a layer has too."""

    def __init__(self, owner: nn.Linear) -> None:
        super().__init__()
        self.weight = owner.weight

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(F.linear(out, self.weight), target)


@pytest.mark.parametrize("context", [nullcontext, CAST])
def test_a_loss_that_shares_a_weight_with_a_layer_of_its_stage_where_each_layer_is_rebuilt(context: Any) -> None:
    """Layer and loss were rebuilt apart, and added to the gradient one after the other."""
    assert_exact(
        lambda: [linear(), nn.Tanh(), linear(), nn.LayerNorm(WIDTH), linear()],
        loss=lambda layers: Head(layers[2]),
        partition=[2, 3],
        remat="layer",
        context=context,
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_shared_weight_that_some_microbatches_do_not_use_under_autocast(schedule: str) -> None:
    def make() -> list[Any]:
        shared = linear()
        coin = Do(lambda part, x: part(x) if torch.rand(()) < 0.5 else x, shared)
        return [coin, nn.LayerNorm(WIDTH), shared, linear()]

    for seed in range(3):
        assert_exact(make, schedule=schedule, partition=[2, 2], context=CAST, seed=seed)


def test_a_function_that_uses_the_weight_of_another_stage() -> None:
    def make() -> list[Any]:
        first, last = linear(), linear()
        return [first, nn.Tanh(), Do(lambda x: F.linear(x, first.weight) + x @ last.weight), nn.LayerNorm(WIDTH), last]

    for schedule in ("1f1b", "zb-h1"):
        for partition in ([1, 4], [2, 3], [3, 2]):
            assert_exact(make, schedule=schedule, partition=partition)


def test_the_same_tensor_twice_arrives_in_another_process_as_one() -> None:
    h = torch.randn(3)
    for tree in ((h, h), [h, h], {"a": h, "b": (h, 1)}):
        tensors, _ = layout.key_of(tree)
        made = layout.TreeLayout(layout.describe(tree)).tree(tensors)
        assert len(tensors) == 1
        found = torch.utils._pytree.tree_leaves(made)
        assert found[0] is found[1]


def test_a_linear_of_a_microbatch_of_one_sample_in_another_layout() -> None:
    """torch looks at the strides of dimensions of size one when it chooses between one product and many."""
    attention = partial(nn.MultiheadAttention, WIDTH, 2, batch_first=True)

    def swapped(part: nn.Module, x: Tensor) -> Tensor:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
        return part(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]

    assert_exact(lambda: [linear(), Do(swapped, attention()), linear()], batch_dims=None)
    x = torch.randn(1, WIDTH, 4).transpose(1, 2).transpose(0, 1).requires_grad_()
    part = linear()
    stage = gapless.stage.stage.Stage([Do(lambda part, x: part(x), part)], first_layer=0, split=True)
    assert torch.equal(stage.forward(0, x, step=0), part(x))


# -- schedules -----------------------------------------------------------------------------------------------------

UNORDERED = {
    "B": "0: 0F0 0F1 0F2 0B2 0B0 0B1\n1: 1F0 1F1 1F2 1B2 1B0 1B1",
    "W": "0: 0F0 0F1 0F2 0I2 0I0 0I1 0W1 0W2 0W0\n1: 1F0 1F1 1F2 1I2 1W2 1I0 1I1 1W1 1W0",
    "F": "0: 0F1 0F0 0F2 0B1 0B0 0B2\n1: 1F1 1F0 1F2 1B1 1B0 1B2",
}


@pytest.mark.parametrize("text", UNORDERED.values(), ids=UNORDERED)
def test_backwards_out_of_microbatch_order_add_up_in_microbatch_order(text: str) -> None:
    def make() -> list[Any]:
        first, last = linear(), linear()
        last.weight = first.weight
        return [first, nn.LayerNorm(WIDTH), nn.Dropout(0.2), last]

    assert_exact(make, schedule=Schedule.parse(text))


def test_forwards_out_of_order_refuse_layers_that_keep_something_between_microbatches() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    schedule = Schedule.parse("0: 0F1 0F0 0B1 0B0\n1: 1F1 1F0 1B1 1B0")
    with (
        gapless.Pipeline(
            model, devices=2, schedule=schedule, microbatches=2, loss=F.mse_loss, partition=[2, 1]
        ) as pipe,
        pytest.raises(ConfigError, match="forwards of stage 0 out of microbatch order, but its layers change buffers"),
    ):
        pipe.step(torch.randn(8, 4), torch.randn(8, 4))


# -- random numbers ------------------------------------------------------------------------------------------------


@torch.library.custom_op("gapless_tests::untagged", mutates_args=())
def untagged(x: Tensor) -> Tensor:
    return x * torch.rand_like(x)


@untagged.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


untagged.register_autograd(lambda ctx, grad: grad)


def seeds_itself(x: Tensor) -> Tensor:
    torch.manual_seed(7)
    return x * torch.rand(WIDTH)


def forks(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        x = x * torch.rand(WIDTH)
    return x * torch.rand(WIDTH)


def puts_back(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    first = torch.rand(WIDTH)
    torch.set_rng_state(state)
    return x * first + x * torch.rand(WIDTH)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "nn.init": lambda x: x + nn.init.normal_(torch.empty(WIDTH)) + nn.init.kaiming_uniform_(torch.empty(4, WIDTH)),
    "scripted": lambda x: scripted_dropout(x),
    "untagged operator": lambda x: untagged(x),
    "manual_seed": seeds_itself,
    "fork_rng": forks,
    "set_rng_state": puts_back,
}


@pytest.mark.parametrize("remat", ["none", "stage"])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draws_that_no_mode_sees_are_seeded_too(draw: Callable[[Tensor], Tensor], remat: str) -> None:
    """They came from torch's default generator, which all threads share."""
    state = torch.get_rng_state()
    layers = lambda: [linear(), Do(draw), nn.Dropout(0.3), linear(), Do(draw), linear()]  # noqa: E731
    assert_exact(layers, remat=remat)
    torch.set_rng_state(state)


def test_the_callers_generator_stays_where_it_was() -> None:
    model = [linear(), Do(seeds_itself), nn.Dropout(0.3), linear(), nn.Dropout(0.3), Do(DRAWS["scripted"])]
    with gapless.Pipeline(model, devices=2, microbatches=2, loss=F.mse_loss) as pipe:
        state = torch.get_rng_state()
        pipe.step(torch.randn(4, WIDTH, generator=torch.Generator()), torch.zeros(4, WIDTH))
        assert torch.equal(state, torch.get_rng_state())


# -- buffers -------------------------------------------------------------------------------------------------------


def norm() -> nn.Module:
    moving = nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)
    return Do(lambda part, x: part(x.transpose(1, 2)).transpose(1, 2), moving)
