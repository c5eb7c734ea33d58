"""A minibatch that takes several steps: the bits of one plain loop over all their microbatches."""

import copy
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from tests.pipelines import assert_same_gradients, tokens

SEED = 5


def layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 6)).to(dtype)


def plain(model: nn.Sequential, data: list[tuple[Tensor, Tensor]], share: Any, loss: Any = F.mse_loss) -> list[Tensor]:
    """The loop that a user writes: each microbatch with its share of all, and each step with its own draws."""
    losses = []
    for step, (x, y) in enumerate(data):
        for microbatch, (part, goal) in enumerate(zip(x.tensor_split(4), y.tensor_split(4), strict=True)):
            value: Any = part
            for number, layer in enumerate(model):
                torch.manual_seed(gapless.seed_of(SEED, step, microbatch, number))
                value = layer(value)
            found = loss(value, goal)
            (found * share(part, step)).backward()
            losses.append(found.detach() * share(part, step))
    return losses


def pipeline(model: nn.Module, loss: Any = F.mse_loss, **options: Any) -> gapless.Pipeline:
    asked: dict[str, Any] = {"devices": 2, "microbatches": 4, "seed": SEED, "intra_op_threads": 1, **options}
    return gapless.Pipeline(model, loss=loss, **asked)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
def test_steps_with_equal_weights_give_the_bits_of_one_loop_over_all(schedule: str) -> None:
    """Without a weight two steps gave twice the gradient of their minibatch."""
    data = [(torch.randn(8, 6), torch.randn(8, 6)) for _ in range(3)]
    model = layers()
    reference = copy.deepcopy(model)
    with pipeline(model, schedule=schedule) as pipe:
        results = [pipe.step(x, y, weight=1 / 3, sync=number == 2) for number, (x, y) in enumerate(data)]
    losses = plain(reference, data, lambda part, step: len(part) / 24)
    assert_same_gradients(model, reference)
    total = sum(result.loss for result in results if result.loss is not None)
    torch.testing.assert_close(total, sum(losses))
    assert sum(weight for result in results for weight in result.weights) == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uneven_steps_are_exact_with_a_fraction_even_in_float64(dtype: torch.dtype) -> None:
    """1/3 * 2/7 is rounded twice: a Fraction is rounded once, as the share of all is."""
    sizes = (7, 4, 11)
    torch.manual_seed(1)
    data = [(torch.randn(size, 6, dtype=dtype), torch.randn(size, 6, dtype=dtype)) for size in sizes]
    model = layers(dtype)
    reference = copy.deepcopy(model)
    with pipeline(model) as pipe:
        for x, y in data:
            pipe.step(x, y, weight=Fraction(len(x), sum(sizes)))
    plain(reference, data, lambda part, step: len(part) / sum(sizes))
    assert_same_gradients(model, reference)


def test_a_weight_is_multiplied_before_the_number_of_samples_divides() -> None:
    """As documented: loss * (weight * n_m / n)."""
    data = [(torch.randn(9, 6, dtype=torch.float64), torch.randn(9, 6, dtype=torch.float64)) for _ in range(2)]
    model = layers(torch.float64)
    reference = copy.deepcopy(model)
    weights = (0.3, torch.tensor(0.7, dtype=torch.float64))
    with pipeline(model) as pipe:
        for (x, y), weight in zip(data, weights, strict=True):
            pipe.step(x, y, weight=weight)  # type: ignore[arg-type]
    plain(reference, data, lambda part, step: (0.3, 0.7)[step] * len(part) / 9)
    assert_same_gradients(model, reference)


def test_a_loss_summed_over_tokens_is_divided_by_all_tokens() -> None:
    torch.manual_seed(1)
    data = [tokens(8, length) for length in (5, 3)]
    total = sum(y.numel() for _, y in data)

    def summed(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")

    torch.manual_seed(2)
    model = nn.Sequential(nn.Embedding(13, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 13))
    divided, multiplied = (copy.deepcopy(model) for _ in range(2))
    with pipeline(model, summed, loss_weight="sum") as pipe:
        for x, y in data:
            pipe.step(x, y, weight=1 / total)
    plain(multiplied, data, lambda part, step: 1 / total, summed)
    plain(divided, data, lambda part, step: 1, lambda logits, target: summed(logits, target) / total)
    for reference in (multiplied, divided):
        assert_same_gradients(model, reference)


def test_tokens_of_a_step_over_all_tokens_are_its_weight() -> None:
    torch.manual_seed(1)
    data = [tokens(8, length) for length in (5, 3)]
    for x, y in data:
        y[x < 5] = -100
    total = sum(int((y != -100).sum()) for _, y in data)

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    def counted(target: Tensor) -> int:
        return int((target != -100).sum())

    torch.manual_seed(2)
    model = nn.Sequential(nn.Embedding(13, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 13))
    reference = copy.deepcopy(model)
    with pipeline(model, loss, loss_weight=counted) as pipe:
        for x, y in data:
            pipe.step(x, y, weight=Fraction(counted(y), total))
    for x, y in data:
        for part, goal in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
            (loss(reference(part), goal) * (counted(goal) / total)).backward()
    assert_same_gradients(model, reference)


def test_the_documented_reference_takes_the_weight_too() -> None:
    x, y = torch.randn(9, 6), torch.randn(9, 6)
    model = layers()
    reference = copy.deepcopy(model)
    with pipeline(model) as pipe:
        ours = pipe.step(x, y, weight=0.3)
    theirs = gapless.plain_step(reference, x, y, loss=F.mse_loss, microbatches=4, seed=SEED, weight=0.3)
    assert ours.loss is not None
    assert torch.equal(ours.loss, theirs.loss)
    assert_same_gradients(model, reference)


def test_a_scaler_scales_what_is_weighed() -> None:
    data = [(torch.randn(8, 6), torch.randn(8, 6)) for _ in range(2)]
    model = layers()
    reference = copy.deepcopy(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pipeline(model) as pipe:
        for x, y in data:
            pipe.step(x, y, weight=1 / 2, scaler=scaler)
    plain(reference, data, lambda part, step: len(part) / 16 * 1024.0)
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), "half", True, None, torch.ones(2), -0.5])
def test_a_weight_that_is_no_share_is_refused(weight: Any) -> None:
    told = r"weight is .*, but it must be a number of at least 0"
    with pipeline(layers()) as pipe, pytest.raises(gapless.GaplessError, match=told):
        pipe.step(torch.randn(8, 6), torch.randn(8, 6), weight=weight)
    with pytest.raises(gapless.GaplessError, match="sync is 1, but it must be True or False"):
        gapless.stage.batch.share.Share.of(1.0, 1)
