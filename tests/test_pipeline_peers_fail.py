"""What other pipelines get wrong, or refuse, and this one does: each a sentence, each to the last bit."""

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.schedule.action import Kind, Schedule
from gapless.schedule.lower import add_recompute
from gapless.stage.stage import Remat
from tests.pipelines import (
    SEED,
    Do,
    assert_one_model_is_exact,
    assert_same,
    assert_same_gradients,
    mlp,
    schedule_named,
    small_gpt,
    tokens,
)

SPLIT = ["zb-h1", "zb-v", "apart"]


def samples(count: int = 8, width: int = 6, steps: int = 2) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(count, width), torch.randn(count, width)) for _ in range(steps)]


def parts_of(schedule: str | Schedule) -> dict[str, Any]:
    """The options of a pipeline of two devices with this schedule."""
    schedule = schedule if isinstance(schedule, Schedule) else schedule_named(schedule, 2, 4)
    return {"devices": 2, "schedule": schedule, "microbatches": 4, "loss": F.mse_loss, "seed": SEED}


@pytest.mark.parametrize("schedule", ["1f1b", *SPLIT])
def test_an_evaluation_between_two_steps_changes_nothing(schedule: str) -> None:
    model = mlp(dropout=0.5)
    reference = copy.deepcopy(model)
    with gapless.Pipeline(model, **parts_of(schedule), remat="stage") as pipe:
        for step, (x, y) in enumerate(samples()):
            pipe.evaluate(x, y)
            ours = pipe.step(x, y)
            pipe.evaluate(x)
            plain = gapless.plain_step([*reference], x, y, loss=F.mse_loss, microbatches=4, seed=SEED, step=step)
            assert_same(ours.loss, plain.loss, "loss")
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("schedule", SPLIT)
def test_two_parameters_that_receive_the_same_gradient_tensor_do_not_share_it(schedule: str) -> None:
    def total() -> nn.Module:
        return Do(lambda one, two, x: x + (one.weight[0] + two.weight[0]), nn.Embedding(1, 6), nn.Embedding(1, 6))

    def twins() -> nn.Module:
        return Do(lambda one, two, x: one(x) + two(x), nn.Linear(6, 6), nn.Linear(6, 6))

    layers = [total(), nn.Linear(6, 6), twins(), nn.Linear(6, 6), twins(), total()]
    assert_one_model_is_exact(layers, samples(), schedule=schedule)


@pytest.mark.parametrize("frozen", [1, 2, 3])
@pytest.mark.parametrize("schedule", SPLIT)
def test_frozen_stages_before_a_split_backward_get_no_gradient_and_the_others_theirs(
    schedule: str, frozen: int
) -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    for layer in [*model][:frozen]:
        layer.requires_grad_(False)
    assert_one_model_is_exact(model, samples(), schedule=schedule)
    assert all(p.grad is None for layer in [*model][:frozen] for p in layer.parameters())


@pytest.mark.parametrize(("schedule", "remat"), zip(["1f1b", *SPLIT], ["layer", "none", "stage", "layer"], strict=True))
def test_sequence_lengths_may_change_from_step_to_step(schedule: str, remat: str) -> None:
    batches = [tokens(8, length) for length in (5, 3, 6, 1)]
    loss: Callable[[Any, Any], Tensor] = lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten())  # noqa: E731
    assert_one_model_is_exact(small_gpt(4), batches, schedule=schedule, loss=loss, remat=remat)


runs: list[str] = []  # a log: a recompute does not put it back


class Counted(nn.Module):
    """A linear layer with dropout that tells how often it ran."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        runs.append(self.name)
        return F.dropout(torch.tanh(self.linear(x)), 0.3, self.training)


WITH_RECOMPUTES = add_recompute(gapless.make_schedule("1f1b", devices=2, microbatches=4))


@pytest.mark.parametrize(
    ("schedule", "remat"),
    [*itertools.product(["1f1b", *SPLIT], ["stage", "layer"]), (WITH_RECOMPUTES, "none")],
)
def test_each_layer_is_recomputed_once_also_with_a_split_backward_and_exactly(schedule: Any, remat: Remat) -> None:
    model = [Counted(str(number)) for number in range(8)]
    assert_one_model_is_exact(model, samples(steps=1), schedule=schedule, remat=remat)
    with gapless.Pipeline(model, **parts_of(schedule), remat=remat) as pipe:
        assert (Kind.WEIGHT_GRAD in pipe.schedule.kinds) == (schedule in SPLIT)
        (x, y), (a, b) = samples()
        pipe.step(x, y)
        runs.clear()
        pipe.step(a, b)
        again = Counter(stage for stage, _ in pipe.schedule.recomputed)
        stages = [stage for stage, count in enumerate(pipe.partition) for _ in range(count)]
    # 4 microbatches, and once again where the schedule has an R: not where the backward comes right after its forward.
    expected = [4 + again[stage] for stage in stages] if remat != "layer" else [8] * 8
    assert [runs.count(layer.name) for layer in model] == expected
    assert sum(expected) > 32
    if schedule not in SPLIT and remat != "layer":  # on the last device every backward comes right after its forward
        assert expected == [8] * 4 + [4] * 4


@pytest.mark.parametrize("schedule", ["interleaved", "auto", "zb-v"])
def test_a_last_batch_smaller_than_the_number_of_microbatches_runs_with_fewer(schedule: str) -> None:
    batches = [(torch.randn(n, 6), torch.randn(n, 6)) for n in (8, 3, 1, 8, 3)]
    assert_one_model_is_exact(mlp(), batches, schedule=schedule, microbatches=8)
