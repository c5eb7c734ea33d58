"""What other pipelines get wrong, or refuse, and this one does: each a sentence, each to the last bit."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.schedule.action import Action, Kind, Schedule
from gapless.stage.stage import Remat
from tests.pipelines import (
    SEED,
    Do,
    Model,
    assert_one_model_is_exact,
    assert_same,
    mlp,
    parameters_of,
    schedule_named,
    small_gpt,
    tokens,
)

SPLIT = ["zb-h1", "zb-v", "apart"]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def samples(count: int = 8, width: int = 6, steps: int = 2) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(count, width), torch.randn(count, width)) for _ in range(steps)]


def linears(count: int, width: int = 6) -> list[nn.Module]:
    return [nn.Linear(width, width) for _ in range(count)]


def parts_of(name: str, microbatches: int = 4) -> dict[str, Any]:
    """The options of a pipeline of two devices with this schedule."""
    return {
        "devices": 2,
        "schedule": schedule_named(name, 2, microbatches),
        "microbatches": microbatches,
        "loss": F.mse_loss,
        "seed": SEED,
    }


def defers(pipe: gapless.Pipeline) -> bool:
    """Whether the schedule as run has weight gradients of their own: else a test of the split would test nothing."""
    return Kind.WEIGHT_GRAD in pipe.schedule.kinds


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", *SPLIT])
def test_two_steps_without_zero_grad_add_up(schedule: str) -> None:
    assert_one_model_is_exact(mlp(), samples(steps=3), schedule=schedule)


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
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(_grad(a), _grad(b))


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", *SPLIT])
def test_a_batch_that_the_microbatches_do_not_divide_weighs_every_sample_the_same(schedule: str) -> None:
    model = mlp()
    batches = samples(count=7)
    whole = copy.deepcopy(model)
    assert_one_model_is_exact(model, batches, schedule=schedule, microbatches=4)
    for x, y in batches:
        F.mse_loss(whole(x), y).backward()
    for a, b in zip(model.parameters(), whole.parameters(), strict=True):  # the whole batch at once: other sums
        torch.testing.assert_close(_grad(a), _grad(b), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("schedule", SPLIT)
def test_two_parameters_that_receive_the_same_gradient_tensor_do_not_share_it(schedule: str) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            return x + (self.first + self.second)

    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.one(x) + self.two(x)
            return y

    assert_one_model_is_exact(
        [Sum(), nn.Linear(6, 6), Twins(), nn.Linear(6, 6), Twins(), Sum()], samples(), devices=2, schedule=schedule
    )


@pytest.mark.parametrize("frozen", [1, 2, 3])
@pytest.mark.parametrize("schedule", SPLIT)
def test_frozen_stages_before_a_split_backward_get_no_gradient_and_the_others_theirs(
    schedule: str, frozen: int
) -> None:
    model = nn.Sequential(*linears(4))
    for layer in [*model][:frozen]:
        layer.requires_grad_(False)
    assert_one_model_is_exact(model, samples(), schedule=schedule)
    assert all(p.grad is None for layer in [*model][:frozen] for p in layer.parameters())


@pytest.mark.parametrize("frozen", ["a stage in the middle", "the last stage", "all but a bias"])
@pytest.mark.parametrize("schedule", SPLIT)
def test_frozen_stages_elsewhere_hand_the_gradient_on(schedule: str, frozen: str) -> None:
    model = nn.Sequential(*linears(4))
    some: dict[str, list[nn.Parameter]] = {
        "a stage in the middle": [*model[1].parameters()],
        "the last stage": [*model[3].parameters()],
        "all but a bias": [*model.parameters()][:1] + [*model.parameters()][2:],
    }
    for parameter in some[frozen]:
        parameter.requires_grad_(False)
    assert_one_model_is_exact(model, samples(), schedule=schedule)


@pytest.mark.parametrize("schedule", SPLIT)
def test_a_norm_shared_by_two_layers_of_a_stage(schedule: str) -> None:
    def stage() -> list[nn.Module]:
        norm = nn.LayerNorm(6)
        return [nn.Linear(6, 6), norm, nn.Linear(6, 6), norm]

    model = nn.Sequential(*[layer for _ in range(4) for layer in stage()])
    assert_one_model_is_exact(model, samples(), schedule=schedule, partition=[4] * 4 if schedule == "zb-v" else [8, 8])


@pytest.mark.parametrize("schedule", SPLIT)
def test_a_bias_shared_by_two_layers_of_a_stage(schedule: str) -> None:
    class Biased(nn.Module):
        def __init__(self, bias: nn.Parameter) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(6, 6) / 2), bias

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(F.linear(x, self.weight, self.bias))

    def stage() -> list[nn.Module]:
        bias = nn.Parameter(torch.randn(6))
        return [Biased(bias), Biased(bias)]

    model = [layer for _ in range(4) for layer in stage()]
    partition = [2] * 4 if schedule == "zb-v" else [4, 4]
    assert_one_model_is_exact(model, samples(), schedule=schedule, partition=partition)


@pytest.mark.parametrize("schedule", ["1f1b", *SPLIT])
def test_integer_tensors_reach_an_embedding_in_a_later_stage(schedule: str) -> None:
    embedding = nn.Embedding(5, 6)
    model = [
        Do(lambda linear, x, ids: (linear(x), ids), nn.Linear(6, 6)),
        Do(lambda linear, pair: (torch.tanh(linear(pair[0])), pair[1]), nn.Linear(6, 6)),
        Do(lambda table, pair: pair[0] + table(pair[1]), embedding),
        nn.Linear(6, 6),
    ]
    batches = [((torch.randn(8, 6), torch.randint(5, (8,))), torch.randn(8, 6)) for _ in range(2)]
    assert_one_model_is_exact(model, batches, schedule=schedule)
    assert embedding.weight.grad is not None


@pytest.mark.parametrize("schedule", ["1f1b", *SPLIT])
def test_dicts_and_none_cross_between_stages(schedule: str) -> None:
    def begin(linear: nn.Module, x: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
        return {"x": linear(x), "mask": mask, "rest": [x.detach(), None, "text", 3]}

    def middle(linear: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        assert state["mask"] is None
        assert state["rest"][1:] == [None, "text", 3]
        return {"x": linear(state["x"]) + state["rest"][0], "mask": None, "rest": state["rest"]}

    def end(linear: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        return {"logits": linear(state["x"]), "past": None}

    model = [Do(f, nn.Linear(6, 6)) for f in (begin, middle, middle, end)]
    batches = [({"x": x}, {"y": y, "nothing": None}) for x, y in samples()]
    assert_one_model_is_exact(
        model, batches, schedule=schedule, loss=lambda out, goal: F.mse_loss(out["logits"], goal["y"])
    )


@pytest.mark.parametrize("remat", ["none", "stage", "layer"])
@pytest.mark.parametrize("schedule", ["1f1b", *SPLIT])
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


@pytest.mark.parametrize("remat", ["stage", "layer"])
@pytest.mark.parametrize("schedule", SPLIT)
def test_remat_with_a_split_backward_recomputes_each_layer_once_and_is_exact(schedule: str, remat: Remat) -> None:
    model = [Counted(str(number)) for number in range(8)]
    assert_one_model_is_exact(model, samples(steps=1), schedule=schedule, remat=remat)
    with gapless.Pipeline(model, **parts_of(schedule), remat=remat) as pipe:
        assert defers(pipe)
        (x, y), (a, b) = samples()
        pipe.step(x, y)
        runs.clear()
        pipe.step(a, b)
        again = Counter(stage for stage, _ in pipe.schedule.recomputed)
        stages = [stage for stage, count in enumerate(pipe.partition) for _ in range(count)]
    # 4 microbatches, and once again where the schedule has an R: not where the backward comes right after its forward.
    expected = [4 + again[stage] for stage in stages] if remat == "stage" else [8] * 8
    assert [runs.count(layer.name) for layer in model] == expected
    assert sum(expected) > 32


@pytest.mark.parametrize("schedule", ["zb-v", "v-half", "v-min", "dualpipe-v"])
def test_v_schedules_evaluate(schedule: str) -> None:
    model = mlp(dropout=0.5)
    (x, y), _ = samples(count=9)
    with gapless.Pipeline(model, **parts_of(schedule)) as pipe:
        result = pipe.evaluate(x, y)
    model.eval()
    parts = [model(part) for part in x.tensor_split(4)]
    assert torch.equal(result.outputs, torch.cat(parts))
    losses = [F.mse_loss(part, goal) for part, goal in zip(parts, y.tensor_split(4), strict=True)]
    assert_same(result.losses, tuple(loss.detach() for loss in losses), "losses")


@pytest.mark.parametrize("schedule", ["1f1b", *SPLIT])
def test_hooks_on_parameters_fire_for_every_microbatch_in_order(schedule: str) -> None:
    """A hook may change the gradient, and one after accumulation may use it up: both as in the plain loop."""

    def hooked(model: Model) -> list[str]:
        seen: list[str] = []

        def halve(event: str, grad: Tensor) -> Tensor:
            seen.append(event)
            return grad * 0.5

        def note(event: str, _: Tensor) -> None:
            seen.append(event)

        for number, parameter in enumerate(parameters_of(model)):
            parameter.register_hook(partial(halve, f"{number} hook"))
            parameter.register_post_accumulate_grad_hook(partial(note, f"{number} after"))
        return seen

    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 6))
    reference = copy.deepcopy(model)
    ours, plain = hooked(model), hooked(reference)
    (x, y), _ = samples()
    with gapless.Pipeline(model, **parts_of(schedule)) as pipe:
        pipe.step(x, y)
    gapless.plain_step([*reference], x, y, loss=F.mse_loss, microbatches=4, seed=SEED)
    for number, (a, b) in enumerate(zip(model.parameters(), reference.parameters(), strict=True)):
        assert torch.equal(_grad(a), _grad(b))
        events = [event for event in ours if event.startswith(f"{number} ")]
        assert events == [f"{number} hook", f"{number} after"] * 4
        assert events == [event for event in plain if event.startswith(f"{number} ")]


@pytest.mark.parametrize("schedule", ["1f1b", *SPLIT])
def test_an_optimizer_may_step_in_the_hook_after_accumulation(schedule: str) -> None:
    def updating(model: Model) -> None:
        for parameter in parameters_of(model):
            parameter.register_post_accumulate_grad_hook(_use_up)

    model = nn.Sequential(*linears(4))
    reference = copy.deepcopy(model)
    updating(model)
    updating(reference)
    (x, y), _ = samples()
    with gapless.Pipeline(model, **parts_of(schedule, 1)) as pipe:
        pipe.step(x, y)
    gapless.plain_step([*reference], x, y, loss=F.mse_loss, microbatches=1)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert a.grad is None
        assert torch.equal(a, b)


def _use_up(parameter: Tensor) -> None:
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.1)
    parameter.grad = None


def backwards() -> Schedule:
    """Two devices that run the microbatches' forwards from the last to the first, and the backwards in order."""

    def row(stage: int) -> Iterator[Action]:
        for microbatch in reversed(range(4)):
            yield Action(stage, Kind.FORWARD, microbatch)
        for microbatch in range(4):
            yield Action(stage, Kind.BACKWARD, microbatch)

    return Schedule.of([row(0), row(1)])


@pytest.mark.parametrize("remat", ["none", "stage", "layer"])
def test_losses_and_outputs_are_in_the_order_of_the_microbatches_whatever_ran_first(remat: str) -> None:
    schedule = backwards()
    assert str(schedule).splitlines()[0] == "0: 0F3 0F2 0F1 0F0 0B0 0B1 0B2 0B3"
    model = mlp(dropout=0.3)
    assert_one_model_is_exact(model, samples(count=9), schedule=schedule, remat=remat)


class TwiceUsed(nn.Module):
    """A weight with two uses whose gradients autograd sums before it accumulates them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(6, 6), way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "two calls":
            return torch.tanh(self.linear(torch.tanh(self.linear(x))))
        if self.way == "call and transpose":
            return torch.tanh(self.linear(x)) @ self.linear.weight
        return torch.tanh(self.linear(x)) * self.linear.weight.sum() + self.linear.weight.diagonal()


@pytest.mark.in_pairs
@pytest.mark.parametrize("remat", ["none", "stage", "layer"])
@pytest.mark.parametrize("way", ["two calls", "call and transpose", "call and something else"])
@pytest.mark.parametrize("schedule", SPLIT)
def test_a_parameter_used_twice_is_summed_as_autograd_sums_it(schedule: str, way: str, remat: str) -> None:
    model = [TwiceUsed(way) for _ in range(4)]
    assert_one_model_is_exact(model, samples(), schedule=schedule, remat=remat)


@pytest.mark.parametrize("schedule", SPLIT)
def test_a_layer_used_twice_in_a_stage_is_summed_as_autograd_sums_it(schedule: str) -> None:
    layers = linears(4)
    model = [layer for layer in layers for _ in range(2)]
    partition = [2] * 4 if schedule == "zb-v" else [4, 4]
    assert_one_model_is_exact(model, samples(), schedule=schedule, partition=partition)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "auto", "zb-h1", "zb-v"])
def test_a_last_batch_smaller_than_the_number_of_microbatches_runs_with_fewer(schedule: str) -> None:
    batches = [(torch.randn(n, 6), torch.randn(n, 6)) for n in (8, 3, 1, 8, 3)]
    assert_one_model_is_exact(mlp(), batches, schedule=schedule, microbatches=8)


class SelfAttention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]  # type: ignore[no-any-return]


@pytest.mark.in_pairs
@pytest.mark.parametrize("remat", ["none", "stage", "layer"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", [SelfAttention, Recurrent])
@pytest.mark.parametrize("schedule", SPLIT)
def test_attention_and_lstm_of_torch_under_a_split_backward_and_with_dropout(
    schedule: str, kind: Callable[[float], nn.Module], dropout: float, remat: str
) -> None:
    model = nn.Sequential(*(kind(dropout) for _ in range(4)))
    batches = [(torch.randn(4, 3, 8), torch.randn(4, 3, 8)) for _ in range(2)]
    assert_one_model_is_exact(model, batches, schedule=schedule, microbatches=3, remat=remat)
