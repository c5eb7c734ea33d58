"""A traced model keeps functions with a backward of their own: the bits of the loop that a user writes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.errors import PartitionError
from tests.by_hand import loop
from tests.model.hub import hub
from tests.pipelines import assert_same_gradients

WIDTH = 4


class Rounded(torch.autograd.Function):
    """Two results, a weight, a size and a change in place within; its gradients are none that autograd would find."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        rounded = x.round() * weight
        rounded.add_(1)
        return rounded * rows, x.sum(1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, other: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return grad * weight * 3 + other, (grad * x).sum(0), None


class Reversed(torch.autograd.Function):
    """The result is a view of the argument."""

    @staticmethod
    def forward(x: Tensor, scale: float = 2.0) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -grad * ctx.scale, None


def apply(of: Any, *args: Any) -> Any:
    return of.apply(*args)


class Model(nn.Module):
    def __init__(self, middle: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.weight = nn.Parameter(torch.rand(WIDTH))
        self.middle = middle

    def forward(self, x: Tensor) -> Any:
        return self.last(self.middle(self, self.first(x)))


def both_kinds(model: Model, x: Tensor) -> Any:
    rounded, total = apply(Rounded, x, model.weight, x.shape[0])
    with torch.no_grad():
        aside = apply(Reversed, rounded) * 2
    return apply(Reversed, model.second(rounded + total), 3.0) + aside


@pytest.mark.parametrize(
    "options", [{"schedule": "zb-v", "remat": "stage"}, {"compile": {"backend": "aot_eager"}}], ids=str
)
def test_a_traced_model_keeps_a_backward_of_its_own(options: dict[str, Any]) -> None:
    """It was refused; without a word autograd would have differentiated the forward."""
    model = Model(both_kinds)
    plain, x, y = copy.deepcopy(model), torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    asked: dict[str, Any] = {"devices": 2, "microbatches": 3, "loss": F.mse_loss, "intra_op_threads": 1, **options}
    with gapless.Pipeline(model, **asked) as pipe:
        pipe.step(x, y)
        outputs = pipe.evaluate(x).outputs
    loop(plain, x, y, 3)
    assert torch.equal(outputs, torch.cat([plain(part) for part in x.tensor_split(3)]))
    assert_same_gradients(model, plain)


class Draws(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Closes(Draws):
    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Any) -> Tensor:  # type: ignore[override]
        made: Tensor = x * model.weight
        return made


class Changes(Draws):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


bound = Draws.apply


@pytest.mark.parametrize(
    ("middle", "message"),
    [
        (lambda model, x: apply(Draws, x), r"Draws.apply, whose forward draws random numbers that no stage can seed"),
        (lambda model, x: apply(Closes, x, model), r"Closes.apply, whose forward uses a tensor that it is not given"),
        (lambda model, x: apply(Changes, x), r"Changes.apply, which changes its arguments in place"),
        (lambda model, x: bound(x), r"the forward of Draws, whose own backward .* call it as Draws.apply"),  # type: ignore[no-untyped-call]
    ],
)
def test_what_can_not_be_kept_is_refused(middle: Any, message: str) -> None:
    """A name that was bound to apply went unnoticed, and its backward was lost."""
    with pytest.raises(PartitionError, match=message) as refused:
        gapless.Pipeline(Model(middle), devices=2, microbatches=1, loss=F.mse_loss, example=torch.randn(2, WIDTH))
    assert "cut the model by hand" in str(refused.value)


def test_an_operator_with_a_backward_of_its_own_stays_one() -> None:
    """Newer versions of torch call its function in another way, which was refused."""

    @torch.library.custom_op("gapless_tests::tripled", mutates_args=())
    def tripled(x: Tensor) -> Tensor:
        return x * 3

    tripled.register_fake(torch.empty_like)
    tripled.register_autograd(lambda ctx, grad: grad * 5)
    torch.manual_seed(1)
    model = Model(lambda model, x: torch.ops.gapless_tests.tripled(x))
    plain, x, y = copy.deepcopy(model), torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    with gapless.Pipeline(model, devices=2, microbatches=1, loss=F.mse_loss) as pipe:
        pipe.step(x, y)
    F.mse_loss(plain(x), y).backward()
    assert torch.equal(model.first.weight.grad, plain.first.weight.grad)  # type: ignore[arg-type]


@pytest.mark.slow
def test_bloom_trains_with_its_own_gelu() -> None:
    config = hub().BloomConfig(
        vocab_size=24, hidden_size=8, n_layer=1, n_head=2, use_cache=False, hidden_dropout=0.0, attention_dropout=0.0
    )
    torch.manual_seed(1)
    model = hub().BloomForCausalLM(config)
    plain, ids = copy.deepcopy(model), torch.randint(24, (4, 6))
    with gapless.Pipeline(model, devices=2, microbatches=2, intra_op_threads=torch.get_num_threads()) as pipe:
        pipe.step({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
    for part in ids.tensor_split(2):
        (plain(input_ids=part, attention_mask=torch.ones_like(part), labels=part).loss * 0.5).backward()
    assert_same_gradients(model, plain)
