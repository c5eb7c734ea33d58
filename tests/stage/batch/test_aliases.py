"""Tensors that share memory and go to the next stage together: what changes one of them changes the others, as in the
plain loop. Each came as a tensor of its own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.errors import ConfigError
from gapless.run.ranks.wire import layout
from gapless.stage.batch import microbatch as mb
from tests.random_models.blocks import Do
from tests.stage.state_loops import linear
from tests.test_hidden_uses import WIDTH, assert_exact

Made = Callable[[Tensor], tuple[Tensor, Tensor]]
HANDED: dict[str, Made] = {
    "a tensor and its view": lambda h: (h, h[..., :3]),
    "a view and its tensor": lambda h: (h.transpose(1, 2), h),
    "two views": lambda h: (h[..., :4], h[..., 2:]),
    "a view with history and one without": lambda h: (h.detach()[..., 1:], h[..., :3]),
    "views without history": lambda h: (h.detach()[..., :4], h.detach()[..., 2:]),
    "views of a view": lambda h: (h.view(-1, WIDTH), h.view(-1, WIDTH)[:, ::2]),
}


def changed(part: nn.Module, handed: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    one, other, x = handed
    one.mul_(1.5)
    other.sub_(0.25)
    return part(x) * one.mean() + other.square().mean() * one.sum()  # type: ignore[no-any-return]


def without_gradients(way: Made) -> Made:
    return torch.no_grad()(way)


MADE_WITHOUT_GRADIENTS: dict[str, Made] = {
    "with its tensor": lambda h: (h, without_gradients(lambda h: (h, h[..., :3]))(h)[1]),
    "all of its tensor": lambda h: (without_gradients(lambda h: (h, h.view(h.shape)))(h)[1], h),
    "without its tensor": without_gradients(lambda h: (h[..., :3], h[..., 3:])),
}


WAYS = (("1f1b", "none"), ("zb-h1", "stage"), ("zb-h1", "layer"))


@pytest.mark.parametrize(("kind", "way"), zip(MADE_WITHOUT_GRADIENTS, WAYS, strict=True))
def test_a_view_made_under_no_grad_has_no_gradient_in_the_next_stage_either(kind: str, way: tuple[str, str]) -> None:
    """Torch says that it requires one: it got that of its tensor, or the step ended in an AssertionError."""

    def hand_on(part: nn.Module, x: Tensor) -> Any:
        return *MADE_WITHOUT_GRADIENTS[kind](part(x)), part(torch.tanh(x))

    def used(part: nn.Module, handed: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        one, other, x = handed
        return part(x) * one.mean() + other.square().mean() * one.sum()  # type: ignore[no-any-return]

    assert_exact(
        lambda: [linear(), Do(hand_on, linear()), Do(used, linear()), linear()],
        schedule=way[0],
        remat=way[1],
        partition=[2, 2],
    )


def passed_on(handed: tuple[Tensor, Tensor, Tensor]) -> Any:
    handed[1].add_(0.125)
    return handed


@pytest.mark.parametrize(("kind", "way"), zip(HANDED, WAYS * 2, strict=True))
def test_what_the_next_stage_changes_in_place_changes_for_all_that_share_its_memory(
    kind: str, way: tuple[str, str]
) -> None:
    def hand_on(part: nn.Module, x: Tensor) -> Any:
        return *HANDED[kind](part(x)), part(torch.tanh(x))

    assert_exact(
        lambda: [linear(), Do(hand_on, linear()), Do(passed_on), Do(changed, linear()), linear()],
        schedule=way[0],
        remat=way[1],
        partition=[2, 3],
    )


@pytest.mark.parametrize("kind", HANDED)
def test_they_share_memory_in_another_process_too(kind: str) -> None:
    handed = HANDED[kind](torch.randn(3, 4, WIDTH, requires_grad=True) * 1)
    tensors, _ = layout.key_of(handed)
    assert len(tensors) == 1
    made = layout.TreeLayout(json.loads(json.dumps(layout.describe(handed))))
    sent = [place.finished(each.detach().clone()) for place, each in zip(made.places, tensors, strict=True)]
    for theirs, ours in zip(made.tree(sent), handed, strict=True):
        assert torch.equal(theirs, ours)
        assert theirs.requires_grad == ours.requires_grad
        assert theirs.stride() == ours.stride()
        assert theirs.untyped_storage().data_ptr() == sent[0].untyped_storage().data_ptr()


def test_a_list_of_views_is_sent_as_it_is_described() -> None:
    """A list of tensors was taken for gradients and sent view by view, so the next rank read memory nobody had set."""
    handed = list(HANDED["two views"](torch.randn(3, 4, WIDTH)))
    tensors, _ = layout.key_of(handed)
    assert [each.shape for each in tensors] == [
        place.shape for place in layout.TreeLayout(layout.describe(handed)).places
    ]


def test_parts_of_one_memory_that_lie_apart_go_apart() -> None:
    """Rows of a table, of which the rest need not travel."""
    table = torch.randn(100, 4)
    tensors, shape = mb.flatten((table[3], table[5], table[5]), views=True)
    assert [len(each) for each in tensors] == [4, 4]
    assert torch.equal(mb.unflatten(tensors, shape)[2], table[5])


def test_memory_that_can_not_be_shared_is_refused() -> None:
    def hand_on(part: nn.Module, x: Tensor) -> Any:
        h = part(x)
        return h, h.detach().view(torch.int32)

    layers = [Do(hand_on, linear()), Do(lambda part, pair: part(pair[0]), linear())]
    with (
        gapless.Pipeline(layers, devices=2, microbatches=2, loss=F.mse_loss) as pipe,
        pytest.raises(ConfigError, match=r"shapes \(2, 6\) and \(2, 6\) that share memory.*clone\(\) one of them"),
    ):
        pipe.step(torch.randn(4, WIDTH), torch.randn(4, WIDTH))


def views_of(rng: random.Random, h: Tensor) -> list[Tensor]:
    """A tensor, and views of it and of each other, none of which leaves anything out, in any order."""
    made = [h]
    for _ in range(rng.randint(2, 4)):
        one = rng.choice(made)
        way = rng.choice(["same", "flat", "turned", "back"])
        if way == "same":
            made.append(one.view(one.shape))
        elif way == "flat" and one.is_contiguous():
            made.append(one.view(-1, WIDTH))
        elif way == "turned":
            made.append(one.transpose(-1, -2))
        else:
            made.append(one.transpose(0, -1).transpose(0, -1))
    handed = [h, *rng.sample(made[1:], rng.randint(1, len(made) - 1))]
    return rng.sample(handed, len(handed))


@pytest.mark.parametrize("seed", range(24))
def test_gradients_of_views_meet_in_the_same_order_and_layout_as_in_plain_training(seed: int) -> None:
    """Where they met at another tensor, the sum had another layout, and products of it other bits."""
    layouts: list[list[Any]] = []

    def make() -> list[Any]:
        layouts.append([])
        noted = layouts[-1]

        def hand_on(part: nn.Module, x: Tensor) -> Any:
            h = part(x) * 1.5
            h.register_hook(lambda grad: noted.append(grad.stride()))
            return views_of(random.Random(seed), h)

        def used(part: nn.Module, handed: list[Tensor]) -> Tensor:
            rng, sums = random.Random(seed), torch.zeros(())
            for view in rng.sample(handed, len(handed)):
                turned = view.transpose(-1, -2) if rng.random() < 0.5 else view
                sums = sums + torch.tanh(turned @ torch.linspace(-1, 1, turned.shape[-1])).sum() * rng.random()
            return part(handed[0].reshape(-1, 4, WIDTH) * sums)  # type: ignore[no-any-return]

        return [linear(), Do(hand_on, linear()), Do(used, linear()), linear()]

    assert_exact(make, schedule="1f1b", partition=[2, 2])
    ours, plain = layouts
    assert sorted(ours) == sorted(plain)


def _of_one(rng: random.Random, h: Tensor) -> list[Tensor]:
    """Views of a tensor, parts of it too, of which none need be made from another."""
    made = [h, h[..., :WIDTH]]
    for _ in range(rng.randint(1, 3)):
        one = rng.choice(made)
        made += rng.choice([[one.transpose(0, -1).transpose(0, -1)], [one[..., 1:]], one.split(2, 1), one.chunk(2, -1)])
    return made


@pytest.mark.parametrize(("seed", "way"), zip(range(12), WAYS * 4, strict=True))
def test_views_have_gradients_of_their_own(seed: int, way: tuple[str, str]) -> None:
    """They met at a tensor that the layer hands on, and so before uses in its own stage, without the hooks of views:
    off by 2e-10 where the uses were two, and by a quarter where a hook was lost.
    """

    def score(rng: random.Random, view: Tensor) -> Tensor:
        return torch.tanh(view @ torch.linspace(-1, 1, view.shape[-1])).sum() * rng.random()

    def hand_on(part: nn.Module, x: Tensor) -> Any:
        rng = random.Random(seed)
        made = _of_one(rng, part(x) * 1.5)
        for view in made:
            if rng.random() < 0.3:
                view.register_hook(lambda grad: None if grad is None else grad * 0.75)
        handed = rng.sample(made, rng.randint(2, len(made)))
        return *handed, part(torch.tanh(x)), sum((score(rng, view) for view in made), torch.zeros(()))

    def go_on(part: nn.Module, handed: tuple[Tensor, ...]) -> Any:
        rng = random.Random(seed)
        *views, x, scores = handed
        return *rng.sample(views, 2), part(x), sum((score(rng, view) for view in views), scores)

    def used(part: nn.Module, handed: tuple[Tensor, ...]) -> Tensor:
        *views, x, scores = handed
        return part(x * sum((score(random.Random(seed), view) for view in views), scores))  # type: ignore[no-any-return]

    assert_exact(
        lambda: [linear(), Do(hand_on, linear()), Do(go_on, linear()), Do(used, linear())],
        schedule=way[0],
        remat=way[1],
        devices=3,
        partition=[2, 1, 1],
    )


def _use_and_change(one: Tensor, other: Tensor) -> Tensor:
    before = torch.tanh(one).sum()
    return other.mul_(0.5).sum() * before


def _change(one: Tensor, other: Tensor) -> Tensor:
    other.mul_(0.5)
    return torch.zeros(())


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (_use_and_change, "uses its input and changes it in place afterwards"),
        (_change, "with views that were made before"),
    ],
)
def test_a_change_in_place_whose_order_of_gradients_can_not_be_kept_is_refused(
    way: Callable[[Tensor, Tensor], Tensor], words: str
) -> None:
    """Hooks of the views used before were lost, and views got their nodes before the next stage used them."""

    def change(part: nn.Module, handed: tuple[Tensor, Tensor, Tensor]) -> Any:
        one, other, x = handed
        return one, other, part(x) * (1 + way(one, other))

    def used(part: nn.Module, handed: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        one, other, x = handed
        return part(x) * one.sum() + part(x * one.mean()) * other.mean()  # type: ignore[no-any-return]

    def hand_on(part: nn.Module, x: Tensor) -> Any:
        h = part(x) * 1.5
        return h[..., :4], h[..., 2:], x

    layers = [Do(hand_on, linear()), Do(change, linear()), Do(used, linear())]
    with (
        gapless.Pipeline(layers, devices=3, microbatches=2, loss=F.mse_loss) as pipe,
        pytest.raises(ConfigError, match=words),
    ):
        pipe.step(torch.randn(4, WIDTH), torch.randn(4, WIDTH))
