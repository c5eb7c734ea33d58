"""Losses that leave targets out: their mean is over the others, and a microbatch weighs as many as it has."""

import copy
from functools import partial, wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from tests.pipelines import assert_same_gradients

X = torch.arange(48.0).reshape(8, 6).sin()
Y = torch.tensor([0, 1, 2, -100, -100, -100, 1, -100])  # 2, 1, 0 and 1 in four microbatches
CLASSES = torch.tensor([0.5, 1.0, 2.0])


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def pipe_of(model: Any, loss: Any, **options: Any) -> gapless.Pipeline:
    asked: dict[str, Any] = {"devices": 2, "microbatches": 4, "intra_op_threads": 1, **options}
    return gapless.Pipeline(model, loss=loss, **asked)


def own_loop(model: nn.Module, y: Tensor, loss: Any, count: Any) -> None:
    """A microbatch without any target is left out: its mean is no number."""
    total = sum(count(goal) for goal in y.tensor_split(4))
    for part, goal in zip(X.tensor_split(4), y.tensor_split(4), strict=True):
        if count(goal):
            (loss(model(part), goal) * (count(goal) / total)).backward()


def left(target: Tensor, ignored: int = -100) -> int:
    return int((target != ignored).sum())


@pytest.mark.parametrize(
    ("loss", "count"),
    [
        (F.cross_entropy, left),
        (nn.CrossEntropyLoss(), left),
        (nn.CrossEntropyLoss(label_smoothing=0.1), left),
        (torch.compile(nn.CrossEntropyLoss(), backend="eager"), left),
        (nn.CrossEntropyLoss(ignore_index=1), partial(left, ignored=1)),
        (partial(F.cross_entropy, ignore_index=1), partial(left, ignored=1)),
        (nn.CrossEntropyLoss(weight=CLASSES), lambda goal: float(CLASSES[goal[goal != -100]].sum())),
    ],
)
def test_torchs_losses_weigh_what_they_count(loss: Any, count: Any) -> None:
    """They were weighed by samples, which is a mean of means."""
    y = Y.clamp(min=0) if getattr(loss, "ignore_index", -100) == 1 or isinstance(loss, partial) else Y
    model = layers()
    reference, plain, whole = (copy.deepcopy(model) for _ in range(3))
    with pipe_of(model, loss, schedule="zb-h1") as pipe:
        result = pipe.step(X, y)
        assert result.loss is not None
        torch.testing.assert_close(result.loss, loss(whole(X), y).detach())
        evaluated = pipe.evaluate(X, y).loss
        assert evaluated is not None
        assert torch.equal(evaluated, result.loss)
    own_loop(reference, y, loss, count)
    assert_same_gradients(model, reference)
    gapless.plain_step(plain, X, y, loss=loss, microbatches=4)
    assert_same_gradients(plain, reference)


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(reduction="sum"), partial(F.cross_entropy, reduction="sum"), nn.MSELoss(reduction="sum")],
)
def test_torchs_sums_are_not_weighed(loss: Any) -> None:
    model = layers()
    reference = copy.deepcopy(model)
    y: Tensor = torch.randn(8, 3) if isinstance(loss, nn.MSELoss) else Y
    with pipe_of(model, loss) as pipe:
        pipe.step(X, y, weight=1 / 8)
    for part, goal in zip(X.tensor_split(4), y.tensor_split(4), strict=True):
        (loss(reference(part), goal) * (1 / 8)).backward()
    assert_same_gradients(model, reference)


def by_hand(outputs: Tensor, target: Tensor) -> Tensor:
    """A mean that divides by nothing where there is nothing: its backward is not a number, times zero or not."""
    kept = target != -100
    each = F.cross_entropy(outputs, target.clamp(min=0), reduction="none")
    return (each * kept).sum() / kept.sum()


@wraps(F.cross_entropy)
def disguised(outputs: Tensor, target: Tensor) -> Tensor:
    return by_hand(outputs, target)


def test_a_function_that_has_the_name_of_torchs_is_not_taken_for_it() -> None:
    """As torch.compile and decorators make them: they were weighed by samples, without a question."""
    for loss in (disguised, torch.compile(F.cross_entropy, backend="eager")):
        with pipe_of(layers(), loss) as pipe, pytest.raises(gapless.GaplessError, match="spread unevenly"):
            pipe.step(X, Y)


def test_what_an_unknown_loss_counts_is_asked_for_where_it_matters() -> None:
    with pipe_of(layers(), by_hand) as pipe:
        pipe.step(X, Y.clamp(min=0))  # nothing is left out
        pipe.step(X, torch.tensor([0, -100, 1, -100, -100, 2, 0, -100]))  # as much of each
        with pytest.raises(gapless.GaplessError, match=r"targets of -100 are spread unevenly .* pass loss_weight="):
            pipe.step(X, Y)
        with pytest.raises(gapless.GaplessError, match="spread unevenly"):
            pipe.evaluate(X, Y)
    with pipe_of(layers(), by_hand, loss_weight=len) as pipe:
        pipe.step(X[:6], Y[:6].clamp(min=0))
    with pytest.raises(gapless.GaplessError, match="spread unevenly"):
        gapless.plain_step(layers(), X, Y, loss=by_hand, microbatches=4)


@pytest.mark.parametrize(("schedule", "remat"), [("1f1b", "stage"), ("zb-h1", "none"), ("zb-v", "layer")])
def test_a_microbatch_without_any_target_adds_zero_and_not_nan(schedule: str, remat: str) -> None:
    """Zero times a loss that is no number is none either, and so were all gradients."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    reference, plain = (copy.deepcopy(model) for _ in range(2))
    with pipe_of(model, by_hand, loss_weight=left, schedule=schedule, remat=remat) as pipe:
        result = pipe.step(X, Y)
    assert result.losses[2].isnan()
    assert result.loss is not None
    assert result.loss.isfinite()
    own_loop(reference, Y, by_hand, left)
    assert_same_gradients(model, reference)
    gapless.plain_step(plain, X, Y, loss=by_hand, loss_weight=left, microbatches=4)
    assert_same_gradients(plain, reference)


def test_a_minibatch_without_any_target_leaves_zeros() -> None:
    model = layers()
    with pipe_of(model, F.cross_entropy) as pipe:
        result = pipe.step(X, torch.full((8,), -100))
    assert result.loss is not None
    assert result.loss.item() == 0.0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_a_scaler_leaves_a_microbatch_without_targets_out() -> None:
    model = layers()
    reference = copy.deepcopy(model)
    with pipe_of(model, by_hand, loss_weight=left) as pipe:
        pipe.step(X, Y, scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    own_loop(reference, Y, lambda out, goal: by_hand(out, goal) * 4.0, left)
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("count", [float("nan"), -1, None, torch.ones(2)])
def test_a_count_that_is_none_is_refused(count: Any) -> None:
    """It was a ValueError of a fraction."""
    with (
        pipe_of(layers(), by_hand, loss_weight=lambda target: count) as pipe,
        pytest.raises(gapless.GaplessError, match=r"loss_weight gave .* for microbatch 0, but it must count what"),
    ):
        pipe.step(X, Y)


def test_an_evaluation_without_a_target_asks_nobody_what_it_counts() -> None:
    with pipe_of(layers(), by_hand, loss_weight=lambda target: target["missing"]) as pipe:
        assert pipe.evaluate(X).loss is None
