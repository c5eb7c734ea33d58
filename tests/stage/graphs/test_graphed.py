"""On an NVIDIA GPU: actions as CUDA graphs have the bits of the plain loop, and what can't be captured runs eagerly."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gapless import Pipeline, plain_step
from gapless.stage.graphs.graph_trial import Trial, distance
from gapless.zoo.gpt import Block, gpt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]
STEPS = 6


def tokens_loss(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), target.flatten())


def small_gpt(dropout: float = 0.1) -> nn.Sequential:
    torch.manual_seed(0)
    return gpt(vocab=61, width=64, depth=6, heads=4, context=32, dropout=dropout).cuda()


def ids(samples: int = 11, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 61, (samples, 32), generator=made).cuda() for _ in range(2))  # type: ignore[return-value]


def grads(module: nn.Module) -> list[Tensor]:
    return [each.grad for each in module.parameters() if each.grad is not None]


def assert_trains_the_same(
    model: nn.Module, loss: Any, batches: list[tuple[Tensor, Tensor]], *, expected: str = "graphs", **options: Any
) -> None:
    """Step for step, with an optimizer; gradients are kept over some steps, and set to zero or None after others."""
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, reference)]
    with Pipeline(model, loss=loss, graphs=options.pop("graphs", True), **options) as pipe:
        for step, (x, y) in enumerate(batches):
            result = pipe.step(x, y, outputs=True)
            plain = plain_step(reference, x, y, loss=loss, microbatches=options["microbatches"], step=step)
            assert torch.equal(result.loss, plain.loss), f"loss of step {step}"  # type: ignore[arg-type]
            assert torch.equal(result.outputs, plain.outputs), f"outputs of step {step}"
            for ours, theirs in zip(grads(model), grads(reference), strict=True):
                assert torch.equal(ours, theirs), f"a gradient of step {step}"
            for optimizer in optimizers:
                optimizer.step()
                if step % 3 != 1:
                    optimizer.zero_grad(set_to_none=step % 3 == 0)
        assert expected in repr(pipe), repr(pipe)


@pytest.mark.parametrize("remat", ["none", "stage", "layer"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-half"])
@pytest.mark.filterwarnings("error:stage")
def test_every_schedule(schedule: str, remat: Any) -> None:
    batches = [ids(seed=step) for step in range(STEPS)]  # 11 samples in 5 microbatches: two shapes, two weights
    options: dict[str, Any] = {"devices": ["cuda:0"] * 3, "microbatches": 5, "schedule": schedule, "remat": remat}
    assert_trains_the_same(small_gpt(), tokens_loss, batches, **options)


@pytest.mark.parametrize("remat", ["none", "stage", "layer"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.filterwarnings("error:stage")
def test_a_replay_that_seems_to_differ_is_held_against_others(
    schedule: str, remat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seem_to_differ(trial: Trial, one: Any, other: Any) -> None:
        assert distance(one, other) == 0.0
        trial.distance = 1e-8

    monkeypatch.setattr(Trial, "compare", seem_to_differ)
    batches = [ids(seed=step) for step in range(STEPS)]
    options: dict[str, Any] = {"devices": ["cuda:0"] * 3, "microbatches": 5, "schedule": schedule, "remat": remat}
    assert_trains_the_same(small_gpt(), tokens_loss, batches, **options)


@pytest.mark.parametrize("remat", ["none", "stage", "layer"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.filterwarnings("error:stage")
def test_layers_that_need_no_watching(schedule: str, remat: Any) -> None:
    layers = [each for _ in range(6) for each in (nn.Linear(16, 16), nn.Tanh())]
    batches = [(torch.randn(11, 16, device="cuda"), torch.randn(11, 16, device="cuda")) for _ in range(STEPS)]
    options: dict[str, Any] = {"devices": ["cuda:0"] * 3, "microbatches": 5, "schedule": schedule, "remat": remat}
    assert_trains_the_same(nn.Sequential(*layers).cuda(), F.mse_loss, batches, **options)


@pytest.mark.filterwarnings("error:stage")
def test_gradients_and_inputs_that_are_one_number_spread() -> None:
    layers = [nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()]
    batches = [(torch.randn(8, 1, device="cuda").expand(8, 16), torch.zeros(8, device="cuda")) for _ in range(STEPS)]
    model = nn.Sequential(*layers).cuda()
    assert_trains_the_same(model, lambda y, _: y.sum(), batches, devices=["cuda:0"] * 2, microbatches=4)


@pytest.mark.filterwarnings("error:stage")
def test_one_device_and_a_loss_in_bfloat16() -> None:
    model = small_gpt(dropout=0.2).to(torch.bfloat16)
    batches = [ids(7, seed=step) for step in range(STEPS)]
    assert_trains_the_same(model, tokens_loss, batches, devices=["cuda:0"], microbatches=3)


@pytest.mark.filterwarnings("error:stage")
def test_new_shapes_now_and_then_and_a_last_batch_that_is_smaller() -> None:
    batches = [ids(2 if step % 4 == 3 else 8, seed=step) for step in range(10)]
    assert_trains_the_same(small_gpt(), tokens_loss, batches, devices=["cuda:0"] * 2, microbatches=4, schedule="zb-h1")


class Asks(nn.Module):
    """Waits for the GPU."""

    def forward(self, x: Tensor) -> Any:
        return x * 2 if float(x.sum()) > 0 else x * 3


class DrawsOnCpu(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x * torch.rand(()).item()


class Hooked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)
        self.register_forward_hook(lambda module, args, out: out * 1.5)


class Counts(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.seen += 1
        return x + self.seen


@pytest.mark.parametrize(
    ("layer", "reason"),
    [(Asks(), ""), (DrawsOnCpu(), ""), (Hooked(), "hooks"), (Counts(), "buffer"), (nn.BatchNorm1d(16), "counts")],
    ids=lambda value: type(value).__name__,
)
def test_what_can_not_be_captured_runs_eagerly_and_is_named(layer: nn.Module, reason: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), layer, nn.Linear(16, 16)).cuda()
    batches = [(torch.randn(8, 16, device="cuda"), torch.randn(8, 16, device="cuda")) for _ in range(STEPS)]
    with pytest.warns(UserWarning, match=f"stage 1 runs without CUDA graphs: .*{reason}"):
        assert_trains_the_same(model, F.mse_loss, batches, devices=["cuda:0"] * 2, microbatches=4, expected="no graphs")
    held = torch.cuda.memory_reserved()
    for _ in range(20):  # the allocator frees what another stream has used
        torch.empty(1 << 22, device="cuda").record_stream(torch.cuda.Stream())
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() < held + (3 << 24)
    torch.rand(3, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches = [ids(seed=step) for step in range(STEPS)]
        assert_trains_the_same(small_gpt(), tokens_loss, batches, devices=["cuda:0"] * 2, microbatches=4)


def test_a_weight_that_no_layer_has_is_trained_without_graphs() -> None:
    scale = nn.Parameter(torch.ones((), device="cuda"))

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        return tokens_loss(outputs * scale, target)

    model, reference = small_gpt(), small_gpt()
    x, y = ids(8)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with Pipeline(model, devices=["cuda:0"] * 2, microbatches=4, loss=loss, graphs=True) as pipe:
            for step in range(STEPS):
                scale.grad = None
                pipe.step(x, y)
                ours, scale.grad = scale.grad, None
                plain_step(reference, x, y, loss=loss, microbatches=4, step=step)
                assert ours is not None
                assert torch.equal(ours, scale.grad)
    assert any("none of its layers has" in str(each.message) for each in told)


def test_a_closure_that_refers_to_another_tensor_is_captured_again() -> None:
    weights = [torch.rand(61, device="cuda") for _ in range(2)]

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), target.flatten(), weight=weights[0])

    model, reference = small_gpt(), small_gpt()
    x, y = ids(8)
    with Pipeline(model, devices=["cuda:0"] * 2, microbatches=4, loss=loss, loss_weight="sum", graphs=True) as pipe:
        for step in range(2 * STEPS):
            if step == STEPS:
                weights.reverse()
            found = pipe.step(x, y).loss
            plain = plain_step(reference, x, y, loss=loss, microbatches=4, step=step, loss_weight="sum").loss
            assert torch.equal(found, plain)  # type: ignore[arg-type]


def test_what_changes_between_steps_is_seen() -> None:
    model, reference = small_gpt(), small_gpt()
    *_, last = model.parameters()
    x, y = ids(8)
    with Pipeline(model, devices=["cuda:0"] * 2, microbatches=4, loss=tokens_loss, graphs=True) as pipe:
        for step in range(22):
            if step == 7:
                for each in (model, reference):
                    next(part for part in each.modules() if isinstance(part, nn.Dropout)).p = 0.5
            if step == 12:
                for each in (model, reference):
                    each[2].requires_grad_(False)
            if step == 17:
                for each in (model, reference):
                    for parameter in each.parameters():
                        parameter.data = parameter.data * 0.5
            before = last.grad if step % 2 else None
            pipe.zero_grad(set_to_none=bool(step % 2))
            reference.zero_grad(set_to_none=bool(step % 2))
            if step == 5:
                pipe.evaluate(x, y)
            assert torch.equal(
                pipe.step(x, y).loss,  # type: ignore[arg-type]
                plain_step(reference, x, y, loss=tokens_loss, microbatches=4, step=step).loss,
            )
            for ours, theirs in zip(grads(model), grads(reference), strict=True):
                assert torch.equal(ours, theirs), step
            assert before is None or before is not last.grad


def test_a_failure_in_the_middle_leaves_nothing_behind() -> None:
    fails: list[bool] = []

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        if fails:
            raise ValueError("as asked")
        return tokens_loss(outputs, target)

    model, reference = small_gpt(), small_gpt()
    x, y = ids(8)
    with Pipeline(model, devices=["cuda:0"] * 2, microbatches=4, loss=loss, schedule="zb-h1", graphs=True) as pipe:
        for step in range(8):
            pipe.zero_grad()
            reference.zero_grad()
            if step in (2, 3):  # once before the capture, once instead of it
                fails.append(True)
                with pytest.raises(ValueError, match="as asked"):
                    pipe.step(x, y)
                fails.clear()
                pipe.zero_grad()
            pipe.step(x, y)
            plain_step(reference, x, y, loss=tokens_loss, microbatches=4, step=step)
            for ours, theirs in zip(grads(model), grads(reference), strict=True):
                assert torch.equal(ours, theirs), step


def test_auto_takes_graphs_where_they_are_equal_and_faster() -> None:
    batches = [ids(seed=step) for step in range(STEPS)]
    options: dict[str, Any] = {"devices": ["cuda:0"] * 2, "microbatches": 4, "schedule": "zb-h1", "graphs": "auto"}
    assert_trains_the_same(small_gpt(), tokens_loss, batches, **options)


def test_memory_is_at_most_a_little_more() -> None:
    peaks = []
    x, y = ids(16)
    for graphs in (False, True):
        torch.manual_seed(0)
        model = gpt(vocab=61, width=512, depth=8, heads=8, context=32, dropout=0.0).cuda()
        with Pipeline(model, devices=["cuda:0"] * 2, microbatches=8, loss=tokens_loss, graphs=graphs) as pipe:
            for _ in range(STEPS):
                pipe.step(x, y)
                pipe.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_reserved()
            pipe.step(x, y)
            peaks.append(torch.cuda.max_memory_allocated() if not graphs else torch.cuda.max_memory_reserved())
            assert torch.cuda.memory_reserved() <= start + (1 << 22)
        del model, pipe
        torch.cuda.empty_cache()
    print(f"eager {peaks[0] >> 20} MiB, graphed at most {peaks[1] >> 20} MiB")


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.filterwarnings("error:stage")
def test_kernels_that_are_not_deterministic_are_held_against_themselves(schedule: str) -> None:
    """The backward of attention adds up in the order in which threads come."""
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(1024, 16) for _ in range(4))).cuda().bfloat16()
    reference = copy.deepcopy(model)
    x = torch.randn(8, 1024, 1024, device="cuda").bfloat16()
    options: dict[str, Any] = {"loss": F.mse_loss, "microbatches": 4}
    plain_step(reference, x, x, **options)
    seen = []
    for _ in range(10):
        again = copy.deepcopy(model)
        plain_step(again, x, x, **options)
        seen += [torch.equal(one, other) for one, other in zip(grads(reference), grads(again), strict=True)]
    assert not all(seen)
    with Pipeline(model, devices=["cuda:0"] * 2, schedule=schedule, graphs=True, **options) as pipe:
        for _ in range(STEPS):
            pipe.zero_grad()
            pipe.step(x, x)
        assert "no graphs" not in repr(pipe), repr(pipe)
    for ours, theirs in zip(grads(model), grads(reference), strict=True):
        assert torch.linalg.vector_norm(ours - theirs) < 0.02 * torch.linalg.vector_norm(theirs)
