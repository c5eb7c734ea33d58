"""One trace for several modes and sizes, where the model does the same there: the bits of the plain model in each."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree

from gapless.model.traced.capture import Captured
from tests.model.hub import VOCAB, bert, gpt2, llama, t5
from tests.model.training import called

WIDTH = 6


class Own(nn.Module):
    """A function between two linear layers, which is given the model."""

    def __init__(self, do: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.other, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.norm, self.drop, self.seen = nn.BatchNorm1d(WIDTH), nn.Dropout(0.0), None
        self.do = do

    def forward(self, x: Tensor) -> Any:
        return self.last(self.do(self, self.first(x)))


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class RoundedTwice(Rounded):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def rounded(x: Tensor, by: type[Rounded]) -> Any:
    return by.apply(x)  # type: ignore[no-untyped-call]


def stores(model: Any, x: Tensor) -> Tensor:
    model.seen = x.mean()
    return x.relu()


def sizes_and_views(model: Any, x: Tensor) -> Any:
    """The batch size as a number, a squeeze, slices, a backward of its own: all of them hold for every size."""
    x = model.drop(x) * x.shape[0]
    x = x + x.squeeze()
    return rounded(x[:, :, :] * x[:, :1] + x[None, :, :][0], Rounded)


def without_grad(model: Any, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(not model.training):
        scale = x.exp().mean()
    return x * scale


def numbers(*sizes: int) -> Tensor:
    return torch.randn(*sizes, WIDTH)


def tokens(size: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (size, length))
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def dropping(model: nn.Module) -> nn.Module:
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.2
    return model


def leaves_of(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def run(captured: Captured, part: Any) -> Any:
    captured.notice()
    (values,) = captured.prepare([part])
    for layer in captured.layers:
        values = layer(values)
    return values


def traces_of(model: nn.Module, parts: list[Any], modes: tuple[tuple[bool, bool], ...]) -> int:
    """How many it takes, once all bits of outputs, gradients and buffers are compared. `modes`: training, with grad."""
    plain = copy.deepcopy(model)
    captured = Captured(model, [torch.device("cpu")] * 2)
    calls: list[tuple[nn.Module, Callable[[Any], Any]]] = [
        (model, functools.partial(run, captured)),
        (plain, functools.partial(called, plain)),
    ]
    for training, grad in modes:
        for part in parts:
            results = []
            for each, call in calls:
                each.train(training).zero_grad()
                torch.manual_seed(1)
                with torch.set_grad_enabled(grad):
                    outputs = leaves_of(call(part))
                if grad:
                    torch.stack([out.sum() for out in outputs if out.requires_grad]).sum().backward()
                results.append([*outputs, *[value.grad for value in each.parameters()], *each.buffers()])
            for ours, theirs in zip(*results, strict=True):
                assert (ours is None) == (theirs is None)
                assert ours is None or torch.equal(ours, theirs)
    for module in model.modules():
        assert not any(isinstance(value, FakeTensor) for value in vars(module).values())
    assert not any(isinstance(value, FakeTensor) for value in model.state_dict(keep_vars=True).values())
    return captured.num_traces


MODES = ((True, True), (False, False), (False, True))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(llama, 1, id="llama"),
        pytest.param(gpt2, 1, id="gpt2", marks=pytest.mark.slow),
        pytest.param(lambda: gpt2(0.2), 2, id="gpt2 with dropout", marks=pytest.mark.slow),
        pytest.param(bert, 1, id="bert", marks=pytest.mark.slow),
        pytest.param(lambda: dropping(bert()), 2, id="bert with dropout", marks=pytest.mark.slow),
        pytest.param(t5, 1, id="t5", marks=pytest.mark.slow),
    ],
)
def test_a_transformer_is_traced_once_unless_it_drops_something_in_training(
    make: Callable[[], nn.Module], expected: int
) -> None:
    model = make()
    parts = [tokens(2, 5), tokens(1, 5)]
    assert traces_of(model, parts, MODES) == expected


@pytest.mark.parametrize(
    ("do", "expected", "sizes"),
    [
        (sizes_and_views, 1, 3),
        (lambda model, x: model.norm(x.flatten(0, 1)).view_as(x), 2, 3),
        (lambda model, x: x.relu() if model.training else x.tanh(), 2, 1),
        (lambda model, x: x.relu() if x.shape[0] == 1 else x.tanh(), 2, 3),
        (lambda model, x: x.relu() if x.shape[1] > 4 else x.tanh(), 2, 3),
        (lambda model, x: x * torch.rand(WIDTH) if model.training else x, 2, 1),
        (lambda model, x: x * (2.0 if model.training else 3.0), 2, 1),
        (lambda model, x: x * torch.tensor(2.0 if model.training else 3.0), 2, 1),
        (lambda model, x: (model.first if model.training else model.other)(x), 2, 1),
        (lambda model, x: rounded(x, Rounded if model.training else RoundedTwice), 2, 1),
        (lambda model, x: x.detach() + x if model.training else x + x.detach(), 2, 1),
        (without_grad, 2, 1),
        (stores, 4, 3),
    ],
    ids=[
        "sizes and views",
        "batch norm",
        "by mode",
        "by batch size",
        "by length",
        "draws in training",
        "another number",
        "another constant",
        "another parameter",
        "another backward",
        "another order",
        "another grad mode",
        "stores a tensor",
    ],
)
def test_what_a_model_does_otherwise_in_a_mode_or_for_a_size_is_traced_again(
    do: Callable[[Any, Tensor], Tensor], expected: int, sizes: int
) -> None:
    parts = [numbers(3, 4), numbers(1, 4), numbers(3, 5)][:sizes]
    assert traces_of(Own(do), parts, ((True, True), (False, True))) == expected


def test_many_sizes_of_a_kind_get_a_trace_of_their_own() -> None:
    """It holds for all of them, and a look at each would take longer."""
    parts = [numbers(2, length) for length in range(2, 9)]
    assert traces_of(Own(lambda model, x: x.relu()), parts, ((True, True), (False, False))) == 2


class Asking(Own):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) if (x != 0).all() else super().forward(x.relu())


def test_a_batch_that_is_asked_for_its_padding_gets_the_trace_of_its_answer() -> None:
    whole, padded = numbers(2, 5), numbers(2, 5)
    padded[0, 3:] = 0
    parts, modes = [whole, padded, whole], ((True, True), (False, False))
    assert traces_of(Asking(lambda model, x: x.tanh()), parts, modes) == 2


@pytest.mark.slow
def test_so_does_one_of_a_llama() -> None:
    whole, padded = tokens(2, 5), tokens(2, 5)
    padded["attention_mask"][0, 3:] = 0
    assert traces_of(llama(), [whole, padded, whole], ((True, True), (False, False))) == 2


class Product(nn.Linear):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x).relu() * y


def test_a_tensor_that_is_given_twice_is_two_in_the_trace() -> None:
    """It was one: labels that were the ids in the first batch were taken for both in all later ones."""
    x, y = numbers(3), numbers(3)
    assert traces_of(Product(WIDTH, WIDTH), [(x, x), (x, y)], ((True, True),)) == 1
