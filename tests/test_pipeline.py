"""The facade: what each option does, what a step returns, and that nothing of the caller's is disturbed."""

import contextlib
import copy
import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.errors import ConfigError
from gapless.schedule.dependencies import completes, dependencies
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

X, Y = torch.randn(9, 6), torch.randn(9, 6)
VARIED = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "apart"]


def pipeline(model: Any = None, *, schedule: str = "1f1b", **options: Any) -> gapless.Pipeline:
    asked: dict[str, Any] = {"devices": 2, "microbatches": 4, "loss": F.mse_loss, "seed": SEED, **options}
    made = schedule_named(schedule, asked["devices"], asked["microbatches"])
    return gapless.Pipeline(mlp() if model is None else model, schedule=made, **asked)


def logits_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


# -- what a step returns -----------------------------------------------------------------------------------------------


def test_a_result_has_the_loss_and_those_of_the_microbatches_and_no_more_unless_asked() -> None:
    with pipeline() as pipe:
        result = pipe.step(X, Y)
        assert result.outputs is None
        assert result.timeline is None
        assert len(result.losses) == 4
        assert all(loss.shape == () for loss in result.losses)
        assert result.loss is not None
        assert result.loss.shape == ()
        weighted = [loss * (count / 9) for loss, count in zip(result.losses, (3, 2, 2, 2), strict=True)]
        assert torch.equal(result.loss, weighted[0] + weighted[1] + weighted[2] + weighted[3])
        assert pipe.step(X, Y, outputs=True).outputs.shape == (9, 6)


def test_outputs_are_a_tree_where_the_model_returns_one() -> None:
    def both(x: Tensor) -> dict[str, Any]:
        return {"logits": x, "more": [x.sum(1), None], "constant": 3, "mean": x.mean()}

    model = [nn.Linear(6, 6), Do(both)]
    with pipeline(model, loss=lambda out, y: F.mse_loss(out["logits"], y)) as pipe:
        outputs = pipe.step(X, Y, outputs=True).outputs
    assert outputs["logits"].shape == (9, 6)
    assert outputs["more"][0].shape == (9,)
    assert outputs["more"][1] is None
    assert outputs["constant"] == 3
    assert [mean.shape for mean in outputs["mean"]] == [()] * 4  # which no microbatch has for all


def test_the_number_of_steps_decides_what_is_drawn_and_can_be_set() -> None:
    with pipeline(mlp(dropout=0.5)) as pipe:
        first, second = pipe.step(X, Y), pipe.step(X, Y)
        assert pipe.steps == 2
        pipe.steps = 0
        again = pipe.step(X, Y)
    assert first.loss is not None
    assert second.loss is not None
    assert again.loss is not None
    assert not torch.equal(first.loss, second.loss)
    assert torch.equal(first.loss, again.loss)


# -- evaluate ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "devices"), zip([*VARIED, "v-half", "v-min", "dualpipe-v"], (2, 4, 4, 2, 4, 1, 4, 2, 4), strict=True)
)
def test_evaluate_gives_the_bits_of_the_plain_model_in_eval_mode(schedule: str, devices: int) -> None:
    model = small_gpt()
    x, y = tokens(9)
    with pipeline(model, schedule=schedule, devices=devices, loss=logits_loss) as pipe:
        result = pipe.evaluate(x, y)
    model.eval()
    with torch.no_grad():
        parts = [model(part) for part in x.tensor_split(4)]
        losses = tuple(logits_loss(part, goal) for part, goal in zip(parts, y.tensor_split(4), strict=True))
    assert_same(result.outputs, torch.cat(parts), "outputs")
    assert_same(result.losses, losses, "losses")
    weighted = [loss * (count / 9) for loss, count in zip(losses, (3, 2, 2, 2), strict=True)]
    assert_same(result.loss, weighted[0] + weighted[1] + weighted[2] + weighted[3], "loss")


def test_calling_a_pipeline_is_evaluating() -> None:
    model = mlp(dropout=0.3)
    with pipeline(model) as pipe:
        called, evaluated = pipe(X), pipe.evaluate(X)
        assert called.loss is None
        assert torch.equal(called.outputs, evaluated.outputs)
        with_target = pipe(X, Y).loss
        assert with_target is not None
        assert torch.equal(with_target, pipe.evaluate(X, Y).loss)  # type: ignore[arg-type]
        assert model.training
        assert pipe.steps == 0


def test_evaluate_without_a_target_has_outputs_and_no_loss() -> None:
    with pipeline() as pipe:
        result = pipe.evaluate(X)
        assert result.loss is None
        assert result.losses == ()
        assert result.outputs.shape == (9, 6)
        assert pipe.evaluate(X, Y, outputs=False).outputs is None
        assert pipe.evaluate(X[:2]).outputs.shape == (2, 6)  # fewer samples than microbatches


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_evaluate_touches_no_gradient_and_no_step(schedule: str) -> None:
    model = mlp()
    with pipeline(model, schedule=schedule) as pipe:
        pipe.evaluate(X, Y)
        assert all(p.grad is None for p in model.parameters())
        pipe.step(X, Y)
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        pipe.evaluate(X, Y)
        assert pipe.steps == 1
        after = [p.grad for p in model.parameters() if p.grad is not None]
        assert_same(after, before, "gradients")


def test_evaluate_runs_in_eval_mode_and_restores_the_mode_of_every_module() -> None:
    modes: list[bool] = []

    class Watch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            modes.append(self.training)
            assert not torch.is_grad_enabled()
            return x

    model = nn.Sequential(Watch(), nn.Linear(6, 6), nn.Sequential(nn.Dropout(), nn.Dropout()), Watch())
    model[2][0].eval()  # type: ignore[index]
    before = [module.training for module in model.modules()]
    with pipeline(model) as pipe:
        pipe.evaluate(X)
    assert modes == [False] * 8  # in the threads of both devices
    assert [module.training for module in model.modules()] == before
    assert False in before


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_evaluate_works_whatever_the_grad_mode(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    model = mlp()
    with pipeline(model) as pipe:
        expected = pipe.evaluate(X).outputs
        with mode():
            assert torch.equal(pipe.evaluate(X).outputs, expected)
        assert_same_gradients(model, copy.deepcopy(model))
        pipe.step(X, Y)


def test_train_and_eval_of_the_pipeline_are_those_of_the_model() -> None:
    model = mlp(dropout=0.5)
    with pipeline(model) as pipe:
        assert pipe.eval() is pipe
        assert not model.training
        frozen = [pipe.step(X, Y).losses[0] for _ in range(2)]
        assert torch.equal(frozen[0], frozen[1])  # no dropout in eval mode
        pipe.train()
        assert model.training


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.01, 1000.0])
def test_clipping_is_torchs_with_the_same_bits_for_any_number_of_devices(max_norm: float, norm_type: float) -> None:
    reference = mlp()
    gapless.plain_step([*reference], X, Y, loss=F.mse_loss, microbatches=4, seed=SEED)
    models = {devices: copy.deepcopy(reference) for devices in (1, 2, 3, 4)}
    expected = nn.utils.clip_grad_norm_(reference.parameters(), max_norm, norm_type)
    for devices, model in models.items():
        model.zero_grad()
        with pipeline(model, devices=devices) as pipe:
            pipe.step(X, Y)
            assert_same(pipe.clip_grad_norm_(max_norm, norm_type), expected, f"{devices} devices, norm")
        assert_same_gradients(model, reference, f"{devices} devices")


def test_clipping_without_gradients_is_a_norm_of_zero() -> None:
    with pipeline() as pipe:
        assert pipe.clip_grad_norm_(1.0) == 0


# -- inputs and targets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_targets_may_be_trees_and_what_is_not_of_the_batch_goes_to_every_microbatch(schedule: str) -> None:
    target = {"goal": Y, "scale": torch.tensor([2.0, 3.0]), "power": 2, "nothing": None}

    def loss(out: Tensor, goal: dict[str, Any]) -> Any:
        assert goal["scale"].shape == (2,)
        return ((out - goal["goal"]) ** goal["power"]).mean() * goal["scale"].sum()

    assert_one_model_is_exact(mlp(), [(X, target)], schedule=schedule, loss=loss)


def test_batch_dims_say_where_to_cut() -> None:
    def first(linear: nn.Module, x: Tensor, table: Tensor) -> Tensor:
        return linear(x).transpose(0, 1).contiguous() + table  # type: ignore[no-any-return]

    model = [Do(first, nn.Linear(6, 6)), nn.Linear(6, 6)]
    x, table, y = torch.randn(5, 9, 6), torch.randn(9, 1, 6)[:1], torch.randn(5, 9, 6)
    reference = copy.deepcopy(model)
    options: dict[str, Any] = {"batch_dims": (1, None), "target_dims": 1}

    def loss(out: Tensor, goal: Tensor) -> Tensor:
        assert out.shape == goal.transpose(0, 1).shape
        return F.mse_loss(out.transpose(0, 1), goal)

    with pipeline(model, loss=loss, **options) as pipe:
        result = pipe.step((x, table), y, outputs=True)
    plain = gapless.plain_step(reference, (x, table), y, loss=loss, microbatches=4, seed=SEED, **options)
    assert result.outputs.shape == (9, 5, 6)
    assert_same(result.loss, plain.loss, "loss")
    assert_same_gradients(model, reference)


def test_a_gradient_comes_back_in_the_layout_it_has_in_the_plain_loop() -> None:
    """A bias adds up its gradient in the order of memory, so another layout is another sum."""

    shift = Do(lambda table, x: (x + table.weight[0]).transpose(0, 1), nn.Embedding(1, 6))
    for seed in range(20):
        torch.manual_seed(seed)
        batch = torch.randn(33, 17, 6), torch.randn(33, 17, 6)
        model = [copy.deepcopy(shift), nn.Linear(6, 6)]
        assert_one_model_is_exact(model, [batch], loss=lambda out, goal: F.mse_loss(out.transpose(0, 1), goal))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_change_in_place_of_what_the_stage_before_has_saved_does_not_spoil_its_gradient(schedule: str) -> None:
    """Plain torch refuses this model. Here it must be refused too, or be right: as if the change made a new tensor."""
    model = [nn.Linear(6, 6), nn.Tanh(), Do(lambda x: x.mul_(2.0)), nn.Linear(6, 6)]
    reference = [*copy.deepcopy(model[:2]), Do(lambda x: x * 2.0), copy.deepcopy(model[3])]
    with (
        pipeline(model, schedule=schedule, partition=[1] * 4 if schedule == "zb-v" else [2, 2]) as pipe,
        contextlib.suppress(RuntimeError),
    ):
        pipe.step(X, Y)
        gapless.plain_step(reference, X, Y, loss=F.mse_loss, microbatches=4, seed=SEED)
        assert_same_gradients(model, reference)


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "remat"), zip(VARIED, ["none", "stage", "layer"] * 2, strict=True))
def test_the_callers_autocast_holds_in_every_stage(schedule: str, remat: str) -> None:
    seen: list[bool] = []

    def note(x: Tensor) -> Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return x

    model = [*small_gpt(), Do(note)]
    assert_one_model_is_exact(
        model,
        [tokens(8)] * 2,
        schedule=schedule,
        remat=remat,
        loss=logits_loss,
        context=lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    )
    assert all(seen)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_evaluate_casts_as_the_caller_does(schedule: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    with pipeline(model, schedule=schedule) as pipe:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = pipe.evaluate(X).outputs
        assert outputs.dtype == torch.bfloat16
        assert pipe.evaluate(X).outputs.dtype == torch.float32


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_bfloat16_model_is_exact(schedule: str) -> None:
    model = small_gpt().bfloat16()
    assert_one_model_is_exact(model, [tokens(8)] * 2, schedule=schedule, loss=logits_loss)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_grad_scaler_scales_the_losses_and_its_steps_are_those_of_the_plain_loop(schedule: str) -> None:
    model, reference = mlp(), mlp()
    reference.load_state_dict(model.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    with pipeline(model, schedule=schedule) as pipe:
        for step in range(2):
            result = pipe.step(X, Y, scaler=scaler)
            expected = gapless.plain_step([*reference], X, Y, loss=F.mse_loss, microbatches=4, seed=SEED, step=step)
            assert_same(result.loss, expected.loss, "the loss is not scaled")
            for a, b in zip(model.parameters(), reference.parameters(), strict=True):
                assert a.grad is not None
                assert b.grad is not None
                assert torch.equal(a.grad, b.grad * 256)
            scaler.step(optimizer)
            scaler.update()
            plain.step()
            optimizer.zero_grad()
            plain.zero_grad()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_scaler_that_finds_infinities_skips_the_update() -> None:
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    with pipeline(model, loss=lambda out, goal: F.mse_loss(out, goal) * 1e6) as pipe:
        pipe.step(X, Y, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**119
    assert_same(list(model.state_dict().values()), list(before.values()), "weights")


# -- the model ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_parameters_and_state_keep_the_names_of_the_model(schedule: str) -> None:
    model = small_gpt()
    names = [name for name, _ in model.named_parameters()]
    state = copy.deepcopy(model.state_dict())
    with pipeline(model, schedule=schedule, loss=logits_loss) as pipe:
        assert [name for name, _ in pipe.named_parameters()] == names
        assert [id(p) for p in pipe.parameters()] == [id(p) for p in model.parameters()]
        assert list(pipe.state_dict()) == list(state)
        torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.step(*tokens(8))
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.add_(1)
        assert not torch.equal(pipe.state_dict()[names[0]], state[names[0]])
        pipe.load_state_dict(state)
        assert_same(list(pipe.state_dict().values()), list(state.values()), "state")
        with pytest.raises(RuntimeError, match="Missing key"):
            pipe.load_state_dict({})


def test_a_list_of_layers_has_the_names_of_a_sequential() -> None:
    layers: list[Any] = [nn.Linear(6, 6), torch.tanh, nn.Linear(6, 6), lambda x: x * 2]
    with pipeline(layers) as pipe:
        assert [name for name, _ in pipe.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
        pipe.step(X, Y)


# -- cutting and placing -----------------------------------------------------------------------------------------------


def test_stages_are_balanced_by_parameters_unless_a_partition_is_given() -> None:
    model = nn.Sequential(nn.Linear(6, 60), nn.Linear(60, 60), nn.Linear(60, 6), nn.Tanh())
    with pipeline(model) as pipe:
        assert pipe.partition == (1, 3)  # 420 parameters and 3,660 + 366, or 4,080 and 366
    with pipeline(model, partition=[3, 1]) as pipe:
        assert pipe.partition == (3, 1)
        pipe.step(X, Y)


@pytest.mark.parametrize("stages_per_device", [1, 2, 3])
def test_interleaved_takes_any_number_of_stages_per_device(stages_per_device: int) -> None:
    model = mlp(12)
    with pipeline(model, schedule="interleaved", stages_per_device=stages_per_device) as pipe:
        assert pipe.schedule.num_stages == 2 * stages_per_device
    assert_one_model_is_exact(
        model, [(X, Y)], schedule="interleaved", stages_per_device=stages_per_device, microbatches=4
    )


def test_the_length_of_the_partition_says_how_many_stages_a_device_has() -> None:
    with pipeline(mlp(12), schedule="interleaved", partition=[2] * 6) as pipe:
        assert pipe.schedule.num_stages == 6


@pytest.mark.parametrize("batches", [[], X, [X, X], [(X, Y), (X,)]])
def test_shares_of_what_is_no_list_of_minibatches_are_refused(batches: Any) -> None:
    with pipeline() as pipe:
        assert pipe.shares([(X, Y), (X[:3], Y[:3])]) == [Fraction(3, 4), Fraction(1, 4)]
        with pytest.raises(ConfigError, match=r"the minibatches of an update as a list of \(inputs, target\)"):
            pipe.shares(batches)


def test_a_pipeline_prints_its_stages_devices_schedule_and_predicted_bubble() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6))
    with pipeline(model, schedule="zb-v", remat=["none", "stage", "layer", "none"]) as pipe:
        assert repr(pipe).splitlines() == [
            "Pipeline: zb-v, 2 devices, 4 stages, 4 microbatches, predicted bubble 4.0%",
            "  stage 0 on device 0 (cpu): layer 0, 42 parameters",
            "  stage 1 on device 1 (cpu): layer 1, 0 parameters, remat stage",
            "  stage 2 on device 1 (cpu): layer 2, 42 parameters, remat layer",
            "  stage 3 on device 0 (cpu): layer 3, 42 parameters",
        ]


def test_a_traced_pipeline_prints_the_modules_of_its_stages() -> None:
    """It printed "layers 0 to 0", which names nothing of the user's."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(6, 6), nn.Linear(6, 6)
            self.blocks = nn.Sequential(
                *(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)) for _ in range(4))
            )

        def forward(self, x: Tensor) -> Any:
            return self.head(self.blocks(self.embed(x)))

    with pipeline(Net(), devices=["cpu"] * 2) as pipe:
        assert "to be traced and cut when the first batch comes" in repr(pipe)
        pipe.step(X, Y)
        assert [line.partition(": ")[2] for line in repr(pipe).splitlines()[1:]] == [
            "embed to blocks.1, 366 parameters",
            "blocks.2 to head, 366 parameters",
        ]
    with pipeline(Net(), devices=["cpu"] * 5) as pipe:
        pipe.step(X, Y)
        shown = [line.partition(": ")[2] for line in repr(pipe).splitlines()[1:]]
        assert shown[0].startswith("embed")
        assert shown[-1].partition(",")[0].endswith("head")
        assert all("layers" not in line for line in shown)
    with pipeline(Net(), devices=["cpu"]) as pipe:
        pipe.step(X, Y)
        assert "embed to head, 732 parameters" in repr(pipe)


# -- the timeline ------------------------------------------------------------------------------------------------------


def test_steps_are_measured_when_asked_with_the_same_bits() -> None:
    model, found = mlp(), []
    for measured in ([False, False, False], [False, True, False]):
        with pipeline(copy.deepcopy(model)) as pipe:
            losses = []
            for pipe.timeline in measured:
                result = pipe.step(X, Y)
                assert (result.timeline is not None) is pipe.timeline
                losses.append(result.loss)
            found.append((losses, [each.grad for each in pipe.parameters()]))
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("schedule", "remat"), zip(VARIED, ["none", "stage"] * 3, strict=True))
def test_a_measured_timeline_has_the_actions_of_the_schedule_in_an_order_that_respects_dependencies(
    schedule: str, remat: str
) -> None:
    with pipeline(schedule=schedule, timeline=True, remat=remat) as pipe:
        pipe.step(X, Y)
        timeline = pipe.step(X, Y).timeline
        assert timeline is not None
        assert timeline.schedule == pipe.schedule
    began, ended = {}, {}
    for device in range(2):
        spans = timeline.spans(device)
        assert [action for action, _, _ in spans] == list(timeline.schedule.rows[device])
        now = 0.0
        for action, start, end in spans:
            assert now <= start <= end
            now = float(end)
            began.update(dict.fromkeys(completes(action), start))
            ended.update(dict.fromkeys(completes(action), end))
    for device in range(2):
        for action, start, _ in timeline.spans(device):
            for need in dependencies(action, timeline.schedule):
                there = timeline.schedule.placement.device(need.stage, need.microbatch)
                # A device hands on before it tidies up, so another one may begin within that last moment.
                assert (ended if there == device else began)[need] <= start, f"{action} began before {need}"
    assert 0 < timeline.makespan < 60
    assert 0 <= timeline.bubble < 1


# -- what is the caller's stays the caller's ---------------------------------------------------------------------------


def test_the_callers_default_device_holds_in_the_devices_threads() -> None:
    seen: list[str] = []

    def note(x: Tensor) -> Tensor:
        seen.append(torch.empty(1).device.type)
        return x

    with pipeline([nn.Linear(6, 6), Do(note)]) as pipe:
        pipe.step(X, Y)
        with torch.device("meta"):
            pipe.evaluate(X)
        pipe.evaluate(X)
    assert seen == ["cpu"] * 4 + ["meta"] * 4 + ["cpu"] * 4


@pytest.mark.parametrize(("callers", "asked", "expected"), [(4, None, 2), (1, None, 1), (3, None, 1), (1, 3, 3)])
def test_devices_share_the_callers_intra_op_threads_and_leave_its_number_alone(
    callers: int, asked: int | None, expected: int
) -> None:
    seen: list[int] = []

    def note(x: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return x

    later: list[int] = []
    torch.set_num_threads(callers)
    with pipeline([Do(note), nn.Linear(6, 6), Do(note)], intra_op_threads=asked) as pipe:
        pipe.step(X, Y)
        assert torch.get_num_threads() == callers
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    assert torch.get_num_threads() == callers
    assert later == [callers]  # a thread made later does not inherit what a device has set for itself
    assert set(seen) == {expected}


def test_actions_are_named_ranges_in_torchs_profiler() -> None:
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    with pipeline(model, schedule="zb-h1") as pipe, torch.profiler.profile(experimental_config=everywhere) as profile:
        pipe.step(X, Y)
        names = {str(action) for row in pipe.schedule.rows for action in row}
    assert names <= {event.name for event in profile.events()}
