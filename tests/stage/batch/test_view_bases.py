"""A view that one stage hands on and another one changes in place: gradients meet where they do in the plain loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.errors import ConfigError
from gapless.run.ranks.wire import layout
from gapless.stage.batch.view_bases import mark_view, was_view
from tests.random_models.blocks import Do, swapped
from tests.stage.state_loops import linear
from tests.test_hidden_uses import WIDTH, assert_exact


def _hooked(part: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = part(x)
    y.register_hook(lambda grad: grad * 0.75)
    return y


def _also_used(part: nn.Module, x: Tensor) -> Any:
    y: Tensor = part(x)
    return y, y.mean() + (y * 0.3).sum() + (y * 0.7).mean()


def _added(part: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    y, extra = pair
    return part(y.mul_(0.5)) * extra  # type: ignore[no-any-return]


def _shifted(shift: Tensor, x: Tensor) -> Tensor:
    return x.add_(shift)


def _half(part: nn.Module, x: Tensor) -> Tensor:
    return part(x)[..., : WIDTH // 2]  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "relu in place": lambda: [linear(), nn.ReLU(inplace=True), linear()],
    "a relu in a stage of its own": lambda: [linear(), nn.ReLU(inplace=True), Do(lambda x: x.clone())],
    "a hook of the view": lambda: [Do(_hooked, linear()), Do(lambda x: x.mul_(0.5)), linear()],
    "more uses where it is made": lambda: [Do(_also_used, linear()), Do(_added, linear()), linear()],
    "another layout": lambda: [
        swapped(nn.BatchNorm1d(WIDTH)),
        Do(_shifted, nn.Parameter(torch.randn(WIDTH))),
        linear(),
    ],
    "a part of its base": lambda: [Do(_half, linear()), nn.ReLU(inplace=True), nn.Linear(WIDTH // 2, WIDTH)],
    "passed on": lambda: [Do(_hooked, linear()), nn.Identity(), Do(lambda x: x.mul_(0.5))],
    "a view of a view": lambda: [Do(_hooked, linear()), nn.Flatten(0, 1), Do(lambda x: x.mul_(0.5).view(-1, 4, WIDTH))],
}


WAYS = (("looped-bfs", "none"), ("zb-v", "none"), ("zb-v", "stage"))


@pytest.mark.parametrize(("kind", "way"), zip(MODELS, itertools.cycle(WAYS), strict=False))
def test_a_view_of_another_stage_is_changed_in_place_as_in_the_plain_loop(kind: str, way: tuple[str, str]) -> None:
    """Gradients were added in another order or laid out in another way, and a hook ran that torch does not call."""
    assert_exact(lambda: [linear(), *MODELS[kind]()], schedule=way[0], remat=way[1], partition=[1, 1, 1, 1])


def _before_and_after(part: nn.Module, x: Tensor) -> Tensor:
    mean = x.mean() + (x * 0.5).sum()
    return part(x.mul_(0.5)) * mean  # type: ignore[no-any-return]


def _viewed(part: nn.Module, x: Tensor) -> Tensor:
    return part(x).view(x.shape)  # type: ignore[no-any-return]


def _used_and_passed_on(x: Tensor) -> Any:
    return x, x.mean()


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (
            lambda: [Do(_viewed, linear()), Do(_before_and_after, linear())],
            r"a layer of stage 1 uses its input and changes it.*clone",
        ),
        (
            lambda: [Do(_viewed, linear()), Do(_used_and_passed_on), Do(_added, linear())],
            "a stage between uses it too.*new tensor",
        ),
    ],
)
def test_what_would_be_added_in_another_order_is_refused(layers: Callable[[], list[Any]], words: str) -> None:
    made = layers()
    with (
        gapless.Pipeline(
            made, devices=len(made), schedule="1f1b", microbatches=3, loss=F.mse_loss, partition=[1] * len(made)
        ) as pipe,
        pytest.raises(ConfigError, match=words),
    ):
        pipe.step(torch.randn(3, 4, WIDTH), torch.randn(3, 4, WIDTH))


def test_an_input_that_is_no_view_may_be_used_before_it_is_changed() -> None:
    assert_exact(
        lambda: [Do(lambda part, x: torch.tanh(part(x)) + x, linear()), Do(_before_and_after, linear())],
        schedule="1f1b",
        partition=[1, 1],
    )


def test_another_process_is_told_that_a_tensor_was_a_view() -> None:
    tensor = torch.randn(2, 3, requires_grad=True)
    plain = layout.key_of(tensor)[1]
    mark_view(tensor)
    assert layout.key_of(tensor)[1] != plain
    (place,) = layout.TreeLayout(layout.describe(tensor)).places
    assert was_view(place.finished(torch.zeros(2, 3)))
