"""What goes wrong in a user's layer surfaces once, says where, stops every device, and leaves a pipeline that works."""

import copy
import gc
import signal
import textwrap
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.errors import ConfigError, PartitionError, ScheduleError
from gapless.stage.devices import torch_devices
from gapless.stage.split.deferred import defer
from gapless.stage.stage import Remat
from tests.pipelines import Do, alive, assert_same, assert_same_gradients, mlp, schedule_named
from tests.programs import Programs
from tests.run.test_life import X, Y, pipeline

# -- bad input ---------------------------------------------------------------------------------------------------------

_MADE = gapless.make_schedule


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"devices": 3, "model": mlp(2)},
            PartitionError,
            "the model has 2 layers, but 1f1b on 3 devices needs 3 stages: use at most 2 devices, or cut the model",
        ),
        (
            {"devices": 2, "schedule": "zb-v", "model": mlp(3)},
            PartitionError,
            "3 layers, but zb-v on 2 devices needs 4 stages: use schedule='zb-h1', which has 2, at most 1 device, or",
        ),
        (
            {"devices": 4, "schedule": "interleaved", "model": mlp(4)},
            PartitionError,
            "but interleaved on 4 devices needs 8 stages: use schedule='1f1b', which has 4, at most 2 devices, or cut",
        ),
        ({"model": mlp(1)}, PartitionError, "1f1b on 2 devices needs 2 stages: cut the model into smaller layers"),
        ({"loss": lambda outputs: outputs.mean()}, ConfigError, "(outputs), but it is called with the outputs and the"),
        ({"partition": [1, 2]}, PartitionError, "[1, 2] has 2 stages and 3 layers, but the schedule has 2 stages and"),
        ({"partition": [9, -1]}, PartitionError, "at least 1 layer per stage"),
        ({"partition": [4, 2, 2]}, PartitionError, "[4, 2, 2] has 3 stages and 8 layers, but the schedule has 2"),
        ({"model": [nn.Tanh(), 3]}, PartitionError, "layer 1 is a int, which can't be called"),
        (
            {"model": [nn.Tanh(), nn.Linear(6, 6, device="meta")]},
            ConfigError,
            "weight of a Linear is on the meta device",
        ),
        ({"schedule": _MADE("1f1b", devices=3, microbatches=4)}, ScheduleError, "is for 3 devices and 4 microbatches"),
        ({"schedule": _MADE("1f1b", devices=2, microbatches=5)}, ScheduleError, "but this step has 2 devices and 4"),
        ({"schedule": "1f1bb"}, ScheduleError, "there is no schedule named '1f1bb'; did you mean 1f1b?"),
        ({"schedule": "pipedream"}, ScheduleError, "pipedream takes minibatches whole"),
        ({"schedule": 3}, ConfigError, "schedule is a int"),
        ({"devices": 0}, ConfigError, "devices is 0"),
        ({"devices": []}, ConfigError, "devices is an empty list"),
        ({"devices": True}, ConfigError, "devices is True"),
        ({"devices": "cpu"}, ConfigError, "it must say how many: devices=['cpu'] * 4 are 4 threads"),
        ({"devices": torch.device("cpu")}, ConfigError, "it must say how many"),
        ({"devices": "cuda:99"}, ConfigError, "device cuda:99 does not exist: this machine has"),
        ({"devices": "gpu"}, ConfigError, "device 'gpu' is neither cpu nor cuda"),
        ({"devices": ["cpu", "meta"]}, ConfigError, "device meta is neither cpu nor cuda"),
        ({"devices": ["cpu", "cuda:99"]}, ConfigError, "device cuda:99 does not exist: this machine has"),
        ({"microbatches": 0}, ConfigError, "microbatches is 0"),
        ({"microbatches": 2.5}, ConfigError, "microbatches is 2.5"),
        ({"stages_per_device": 2}, ConfigError, "1f1b takes 1 stage per device, not 2"),
        ({"remat": "stages"}, ConfigError, "remat is 'stages', but it must be 'none', 'stage' or 'layer'"),
        ({"remat": ["none"]}, ConfigError, "remat lists 1 stages, but the schedule has 2"),
        ({"remat": ["none", "all"]}, ConfigError, "remat is 'all', but it must be"),
        ({"loss": "mse"}, ConfigError, "loss is 'mse', but it must be a function"),
        ({"loss_weight": "mean"}, ConfigError, "loss_weight is 'mean', but it must be None, 'sum' or a function"),
        ({"intra_op_threads": 0}, ConfigError, "intra_op_threads is 0"),
        ({"intra_op_threads": -1}, ConfigError, "intra_op_threads is -1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_an_impossible_pipeline_is_refused_with_its_numbers(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        pipeline(**options)
    assert words in str(caught.value)


def test_ranks_are_refused_where_there_is_no_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    words = (
        r"a process for each device \(mesh=, torchrun\) needs Linux, and this is Darwin: use devices= in one process"
    )
    with pytest.raises(ConfigError, match=words):
        pipeline(devices=None, mesh=object())
    with pipeline() as pipe:
        pipe.step(X, Y)


def all_gpus() -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


@pytest.mark.parametrize("name", ["cuda", torch.device("cuda")])
def test_cuda_stands_for_all_gpus(name: Any) -> None:
    """It was taken for a list of four letters, and then refused."""
    if all_gpus():
        assert torch_devices(name) == all_gpus()
        assert torch_devices("cuda:0") == all_gpus()[:1]
        return
    with pytest.raises(ConfigError, match="'cuda', all GPUs, but this machine has none: use devices=4"):
        torch_devices(name)


@pytest.mark.parametrize("loss", [F.cross_entropy, F.mse_loss, lambda outputs, target: target["label"]])
def test_a_forgotten_target_is_said_in_a_sentence(loss: Any) -> None:
    """It was whatever the loss makes of None: `argument 'target' must be Tensor, not NoneType`."""
    with pipeline(loss=loss) as pipe:
        with pytest.raises(ConfigError, match=r"no target was given, and the loss failed without .* step\(inputs, t"):
            pipe.step(X)
        pipe.evaluate(X)
    with pipeline(loss=lambda outputs, _: outputs.square().mean()) as pipe:
        pipe.step(X)  # some need none


def test_a_schedule_made_for_four_microbatches_does_not_run_two() -> None:
    with (
        pipeline(schedule=_MADE("1f1b", devices=2, microbatches=4)) as pipe,
        pytest.raises(ScheduleError, match="2 devices and 4 microbatches, but this step has 2 devices and 2 micro"),
    ):
        pipe.step(X[:2], Y[:2])


def test_outputs_that_do_not_fit_the_next_stage_name_that_stage() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(5, 6))
    with pipeline(model) as pipe, pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        pipe.step(X, Y)
    assert caught.value.__notes__ == ["gapless: raised on device 1 (cpu), stage 1, action 1F0"]


@pytest.mark.parametrize("call", ["step", "evaluate"])
@pytest.mark.parametrize(
    ("loss", "batch", "told"),
    [
        (F.mse_loss, (X[:0], Y[:0]), r"the batch is empty \(0 samples\)"),
        (F.mse_loss, (("a", 3),), "no tensor with a batch dimension"),
        (lambda out, goal: (out - goal) ** 2, (X, Y), r"must be a scalar, but it has the shape \(2, 6\)"),
        (lambda out, goal: 1.0, (X, Y), "returned a float"),
    ],
)
def test_an_impossible_batch_or_loss_is_refused(call: str, loss: Any, batch: Any, told: str) -> None:
    with pipeline(loss=loss) as pipe:
        with pytest.raises(gapless.GaplessError, match=told):
            getattr(pipe, call)(*batch)
        assert pipe.steps == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("remat", ["none", "stage", "layer"])
def test_a_step_without_gradients_is_refused_and_leaves_no_trace(remat: Remat, mode: Any) -> None:
    model = mlp()
    reference = copy.deepcopy(model)
    with pipeline(model, remat=remat) as pipe:
        with mode(), pytest.raises(ConfigError, match="gradients, but they are switched off here"):
            pipe.step(X, Y)
        pipe.step(X, Y)
    gapless.plain_step([*reference], X, Y, loss=F.mse_loss, microbatches=4)
    assert_same_gradients(model, reference)


# -- a layer that fails ------------------------------------------------------------------------------------------------


class BoomError(Exception):
    pass


def explode(action: str) -> None:
    raise BoomError(f"in {action}")


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: "Fragile") -> Any:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        layer, grad = ctx.layer, grads[0]
        layer.reach("B")
        layer.reach("I")

        def weight_grad() -> Any:
            layer.reach("W")
            return (grad * x).sum(0)

        return grad * weight, defer(layer.weight, weight_grad), None


class Times:
    """Counts. What has a lock is taken for a log, so that a recompute does not put it back."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0

    def next(self) -> int:
        with self._lock:
            self._count += 1
            return self._count - 1


class Fragile(nn.Module):
    """A layer that can be told to fail: at which kind of action, the how manieth time, and with what."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.disarm()

    def disarm(self) -> None:
        self.kind, self.after = "", 0
        self.error: BaseException | None = None
        self.first: Callable[[], object] | None = None

    def arm(
        self,
        kind: str,
        after: int = 0,
        error: BaseException | None = None,
        first: Callable[[], object] | None = None,
    ) -> None:
        self.kind, self.after, self.error, self.first = kind, after, error, first
        self.times = Times()

    def reach(self, kind: str) -> None:
        if kind != self.kind:
            return
        if self.times.next() >= self.after:
            if self.first is not None:
                self.first()
            if self.error is not None:
                raise self.error
            explode(kind)

    def forward(self, x: Tensor) -> Tensor:
        self.reach("F")
        y: Tensor = _Scale.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return torch.tanh(y)


def model_of(devices: int) -> list[nn.Module]:
    return [layer for _ in range(devices) for layer in (nn.Linear(6, 6), Fragile())]


KINDS = {"F": ("1f1b", "none"), "B": ("1f1b", "none"), "I": ("apart", "none"), "W": ("apart", "none")}


@pytest.mark.in_pairs
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("device", [0, 1, 2])
@pytest.mark.parametrize("kind", ["F", "B", "I", "W", "R"])
def test_an_error_on_any_device_at_any_action_surfaces_once_and_the_next_step_is_exact(
    kind: str, device: int, after: int, capfd: pytest.CaptureFixture[str]
) -> None:
    name, remat = {"R": ("gpipe", "stage")}.get(kind) or KINDS[kind]
    model = model_of(3)
    fragile = model[2 * device + 1]
    assert isinstance(fragile, Fragile)
    reference = copy.deepcopy(model)
    with pipeline(model, devices=3, schedule=schedule_named(name, 3, 4), remat=remat) as pipe:
        first = pipe.step(X, Y)
        # A recompute is a forward after all the others. The last stage's last backward follows its forward: no R.
        recompute = kind == "R"
        after = min(after, 2) if recompute and device == 2 else after
        fragile.arm("F" if recompute else kind, after + (4 if recompute else 0))
        start = time.perf_counter()
        with pytest.raises(BoomError) as caught:
            pipe.step(X, Y)
        assert time.perf_counter() - start < 20
        assert caught.value.__notes__ == [
            f"gapless: raised on device {device} (cpu), stage {device}, action {device}{kind}{after}"
        ]
        functions = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert functions[-2:] == ["reach", "explode"]
        assert functions.count("explode") == 1
        assert all(stage.live == 0 for stage in pipe._staged.stages.values())

        fragile.disarm()
        for parameter in pipe.parameters():
            parameter.grad = None
        again = pipe.step(X, Y)
        assert pipe.steps == 2  # the one that failed does not count
    for step, ours in enumerate((first, again)):
        nn.ModuleList(reference).zero_grad()
        plain = gapless.plain_step(reference, X, Y, loss=F.mse_loss, microbatches=4, step=step)
        assert_same(ours.loss, plain.loss, "loss")
    assert_same_gradients(model, reference)
    assert capfd.readouterr().err == ""


def test_errors_on_several_devices_surface_as_one() -> None:
    model = model_of(3)
    with pipeline(model, devices=3, microbatches=8) as pipe:
        for _ in range(20):
            for layer in model:
                if isinstance(layer, Fragile):
                    layer.arm("B", 1)
            with pytest.raises(BoomError) as caught:
                pipe.step(X, Y)
            assert len(caught.value.__notes__) == 1
            for layer in model:
                if isinstance(layer, Fragile):
                    layer.disarm()
            pipe.step(X, Y)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), StopIteration(), GeneratorExit()])
def test_what_is_no_ordinary_exception_comes_through_too(error: BaseException) -> None:
    model = model_of(2)
    fragile = model[1]
    assert isinstance(fragile, Fragile)
    with pipeline(model) as pipe:
        fragile.arm("F", 1, error)
        with pytest.raises(type(error)):
            pipe.step(X, Y)
        fragile.disarm()
        pipe.step(X, Y)
    assert alive() == []


def test_an_error_in_the_loss_and_in_evaluate_says_where_it_was() -> None:
    def loss(out: Tensor, goal: Tensor) -> Tensor:
        raise BoomError

    with pipeline(loss=loss) as pipe:
        for call in (pipe.step, pipe.evaluate):
            with pytest.raises(BoomError) as caught:
                call(X, Y)
            assert caught.value.__notes__ == ["gapless: raised on device 1 (cpu), stage 1, action 1F0"]


def test_a_failed_evaluation_restores_the_mode_of_every_module() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(), Fragile())
    model[1].eval()
    fragile = model[2]
    assert isinstance(fragile, Fragile)
    fragile.arm("F")
    with pipeline(model) as pipe, pytest.raises(BoomError):
        pipe.evaluate(X)
    assert [layer.training for layer in model] == [True, False, True]


def test_a_failed_step_keeps_nothing_alive() -> None:
    """An exception holds its frames and they hold tensors, but nobody may hold the exception."""

    class MarkedError(Exception):
        pass

    model = model_of(2)
    fragile = model[1]
    assert isinstance(fragile, Fragile)
    with pipeline(model) as pipe:
        error: Exception | None = MarkedError()
        seen = weakref.ref(error)
        fragile.arm("B", error=error)
        with pytest.raises(MarkedError):
            pipe.step(X, Y)
        fragile.disarm()
        error = None
        gc.collect()
        assert seen() is None


# -- nobody hangs ------------------------------------------------------------------------------------------------------


def test_a_step_inside_a_layer_of_the_same_pipeline_is_refused() -> None:
    pipes: list[gapless.Pipeline] = []
    with pipeline([Do(lambda x: pipes[0].step(X, Y)), nn.Linear(6, 6)]) as pipe:
        pipes.append(pipe)
        with pytest.raises(gapless.GaplessError, match="in the middle of another step"):
            pipe.step(X, Y)


def test_two_threads_do_not_mix_their_steps_in_one_pipeline() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def wait(x: Tensor) -> Tensor:
        inside.set()
        assert go_on.wait(10)
        return x

    with pipeline([Do(wait), nn.Linear(6, 6)]) as pipe:
        other = threading.Thread(target=pipe.step, args=(X, Y))
        other.start()
        assert inside.wait(10)
        for call in (pipe.step, pipe.evaluate):
            with pytest.raises(gapless.GaplessError, match="give each thread its own pipeline"):
                call(X, Y)
        go_on.set()
        other.join()
        assert pipe.steps == 1
        pipe.step(X, Y)


def test_a_layer_may_close_its_own_pipeline_which_ends_with_the_step() -> None:
    pipes: list[gapless.Pipeline] = []

    def close(x: Tensor) -> Tensor:
        pipes[0].close()
        return x

    pipe = pipeline([Do(close), nn.Linear(6, 6)])
    pipes.append(pipe)
    assert pipe.step(X, Y).loss is not None
    with pytest.raises(gapless.GaplessError, match="the pipeline is closed"):
        pipe.step(X, Y)
    deadline = time.perf_counter() + 20
    while alive() and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert alive() == []


_INTERRUPTED = """
import sys, threading
import torch, torch.nn.functional as F
import gapless
from gapless.zoo.emulated import Emulated

layers = [Emulated(forward=0.01, input_grad=0.01, weight_grad=0.01) for _ in range(4)]
pipe = gapless.Pipeline(layers, devices=4, schedule="zb-h1", microbatches=8, loss=lambda out, _: out.mean())
x = layers[0].samples(8)
pipe.step(x)
expected = [p.grad.clone() for p in pipe.parameters()]
try:
    print("ready", flush=True)
    while True:
        pipe.step(x)
except KeyboardInterrupt:
    print("interrupted", flush=True)
pipe.zero_grad()
pipe.step(x)
assert all(torch.equal(p.grad, e) for p, e in zip(pipe.parameters(), expected)), "not exact"
pipe.close()
assert threading.active_count() == 1, threading.enumerate()
print("fine", flush=True)
"""


def test_ctrl_c_stops_a_step_and_the_next_one_is_exact(programs: Programs) -> None:
    with programs.start("-c", _INTERRUPTED) as child:
        child.until_it_says("ready")
        time.sleep(0.3)
        child.send_signal(signal.SIGINT)
        child.until_it_says("interrupted", within=30.0)
        assert child.ended(30.0) == (0, "ready\ninterrupted\nfine\n", "")


def test_a_program_that_never_closes_its_pipeline_ends_all_the_same(programs: Programs) -> None:
    program = """
    import torch, torch.nn as nn, torch.nn.functional as F, gapless
    pipe = gapless.Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], devices=2, microbatches=2, loss=F.mse_loss)
    pipe.step(torch.ones(2, 2), torch.ones(2, 2))
    """
    assert programs.run("-c", textwrap.dedent(program)) == (0, "", "")
