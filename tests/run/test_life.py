"""Threads and memory: what a pipeline opens ends with it, and a step leaves nothing behind but gradients."""

import array
import contextlib
import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.schedule.recipes import RECIPES
from gapless.stage.stage import Remat
from tests.pipelines import Do, alive, assert_same, assert_same_gradients, mlp, resident, schedule_named

X, Y = torch.randn(8, 6), torch.randn(8, 6)


def pipeline(model: Any = None, **options: Any) -> gapless.Pipeline:
    asked: dict[str, Any] = {"devices": 2, "microbatches": 4, "loss": F.mse_loss, **options}
    return gapless.Pipeline(mlp() if model is None else model, **asked)


# -- threads -----------------------------------------------------------------------------------------------------------


def test_threads_start_with_the_first_step_and_end_with_close() -> None:
    pipe = pipeline(devices=3)
    assert alive() == []
    pipe.step(X, Y)
    assert alive() == ["gapless device 0", "gapless device 1", "gapless device 2"]
    pipe.evaluate(X)
    assert len(alive()) == 3
    pipe.close()
    assert alive() == []
    pipe.close()


@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_a_closed_pipeline_says_so(call: str) -> None:
    pipe = pipeline()
    with pipe:
        pipe.step(X, Y)
    with pytest.raises(gapless.GaplessError, match="the pipeline is closed; make a new one"):
        getattr(pipe, call)(X, Y)
    assert len(list(pipe.parameters())) == 8  # the model stays


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_pipeline_that_nobody_holds_takes_its_threads_and_its_model_along(schedule: str) -> None:
    pipe = pipeline(schedule=schedule, remat="stage", timeline=True)
    model = weakref.ref(next(pipe.parameters()))
    pipe.step(X, Y)
    pipe.evaluate(X, Y)
    assert len(alive()) == 2
    del pipe
    gc.collect()
    assert alive() == []
    assert model() is None


def test_a_failed_pipeline_that_nobody_holds_ends_too() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ZeroDivisionError

    pipe = pipeline([nn.Linear(6, 6), Do(fail)])
    with contextlib.suppress(ZeroDivisionError):
        pipe.step(X, Y)
    del pipe
    gc.collect()
    assert alive() == []


def test_two_hundred_pipelines_leave_no_thread_and_no_memory() -> None:
    def open_and_close(count: int) -> None:
        for number in range(count):
            schedule = ("1f1b", "zb-v", "gpipe", "interleaved")[number % 4]
            pipe = pipeline(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), schedule=schedule)
            pipe.step(torch.randn(8, 64), torch.randn(8, 64))
            if number % 2:
                pipe.close()
        gc.collect()

    open_and_close(40)
    before = resident()
    open_and_close(160)
    assert alive() == []
    assert resident() - before < 8 * 2**20  # one model of each would be 10 MiB


# -- used from elsewhere -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_two_pipelines_step_at_the_same_time_in_two_threads(schedule: str) -> None:
    """With dropout: both draw, and neither disturbs the other or the caller's generator."""
    models = [mlp(dropout=0.3) for _ in range(2)]
    references = [copy.deepcopy(model) for model in models]
    losses: list[list[Tensor]] = [[], []]
    start = threading.Barrier(2)

    def work(number: int) -> None:
        with pipeline(models[number], schedule=schedule, seed=number) as pipe:
            start.wait()
            losses[number].extend(pipe.step(X, Y).losses[0] for _ in range(10))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, reference in enumerate(references):
        for step in range(10):
            plain = gapless.plain_step([*reference], X, Y, loss=F.mse_loss, microbatches=4, seed=number, step=step)
            assert_same(losses[number][step], plain.losses[0], f"step {step}")
        assert_same_gradients(models[number], reference)
    assert alive() == []


def test_a_layer_may_ask_another_pipeline() -> None:
    """A frozen teacher, say, with a pipeline of its own."""
    teacher = mlp()
    student = [nn.Linear(6, 6), nn.Linear(6, 6)]
    with pipeline(teacher) as inner:
        model = [student[0], Do(lambda x: x + inner.evaluate(x.detach()).outputs), student[1]]
        with pipeline(model) as outer:
            loss = outer.step(X, Y).loss
    assert teacher.training
    teacher.eval()
    plain = [
        student[0],
        Do(lambda x: x + torch.cat([teacher(part) for part in x.detach().tensor_split(len(x))])),
        student[1],
    ]
    assert_same(loss, gapless.plain_step(plain, X, Y, loss=F.mse_loss, microbatches=4).loss, "loss")


@pytest.mark.parametrize("copying", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_pipeline_can_not_be_copied_and_says_what_can(copying: Callable[[Any], Any]) -> None:
    with pipeline() as pipe, pytest.raises(TypeError, match="has threads, so it can't be copied or pickled"):
        copying(pipe)


# -- memory ------------------------------------------------------------------------------------------------------------


def steps_leave_memory_flat(schedule: str, remat: Remat, steps: int) -> None:
    """A microbatch's activations are 64 KiB a layer here: one forgotten in each step would be seen."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)), nn.Dropout(0.1), nn.LayerNorm(32))
    with pipeline(model, schedule=schedule_named(schedule, 2, 4), remat=remat) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())

        def run(count: int) -> None:
            for number in range(count):
                pipe.step(torch.randn(2048, 32), torch.randn(2048, 32), outputs=number % 2 == 0)
                pipe.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                if number % 10 == 0:
                    pipe.evaluate(torch.randn(2048, 32))

        gc.collect()
        gc.disable()  # what only the collector finds would be found late
        try:
            run(30)
            before = resident()
            run(steps)
            grown = resident() - before
        finally:
            gc.enable()
    assert grown < steps * 2**15


def test_fifty_steps_leave_memory_flat() -> None:
    steps_leave_memory_flat("zb-v", "stage", 50)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("remat", ["none", "stage", "layer"])
@pytest.mark.parametrize("schedule", ["1f1b", "apart", "zb-v"])
def test_two_thousand_steps_leave_memory_flat(schedule: str, remat: Remat) -> None:
    steps_leave_memory_flat(schedule, remat, 2000)


class _Watched:
    """The most microbatches alive on each device, counted by layers of all stages; with a lock it is no state."""

    def __init__(self, devices: int) -> None:
        self._lock, self.most = threading.Lock(), [0] * devices

    def count(self, device: int, alive: int) -> None:
        with self._lock:
            self.most[device] = max(self.most[device], alive)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("schedule", [*(name for name, recipe in RECIPES.items() if recipe.synchronous), "apart"])
def test_the_microbatches_alive_on_each_device_are_those_of_the_schedule(schedule: str, devices: int) -> None:
    pipes: list[gapless.Pipeline] = []
    watched = _Watched(devices)
    most = watched.most

    def count(x: Tensor) -> Tensor:
        pipe = pipes[0]
        device = int(threading.current_thread().name.rsplit(maxsplit=1)[1])
        here = [s for s in range(pipe.schedule.num_stages) if pipe.schedule.placement.device(s, 0) == device]
        watched.count(device, sum(pipe._staged.stages[stage].live for stage in here))
        return x

    model = [layer for _ in range(8) for layer in (nn.Linear(6, 6), Do(count))]
    with pipeline(model, devices=devices, schedule=schedule_named(schedule, devices, 8), microbatches=8) as pipe:
        pipes.append(pipe)
        pipe.step(X, Y)
        stages = pipe.schedule.num_stages
        assert tuple(most) == gapless.simulate(pipe.schedule, gapless.Costs(activation=[1] * stages)).peak


class _Token:
    """Something a graph holds, whose life can be watched."""


class _Holding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "Holding") -> Tensor:
        ctx.token = _Token()
        layer.tokens.add(ctx.token)
        layer.most = max(layer.most, len(layer.tokens))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class Holding(nn.Module):
    """Counts how many of its graphs are alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: weakref.WeakSet[_Token] = weakref.WeakSet()
        self.most = 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Holding.apply(x, self)  # type: ignore[no-untyped-call]
        return y


@pytest.mark.parametrize(("schedule", "peaks"), [("naive", [1, 1, 1]), ("gpipe", [8, 8, 8]), ("1f1b", [3, 2, 1])])
def test_a_graph_dies_with_its_backward(schedule: str, peaks: list[int]) -> None:
    model = [layer for _ in range(3) for layer in (nn.Linear(6, 6), Holding())]
    with pipeline(model, devices=3, schedule=schedule, microbatches=8) as pipe:
        pipe.step(X, Y)
        holding = [layer for layer in model if isinstance(layer, Holding)]
        assert [layer.most for layer in holding] == peaks
        assert [len(layer.tokens) for layer in holding] == [0, 0, 0]


def test_a_graph_dies_with_the_first_half_of_a_split_backward() -> None:
    """Between I and W only what W needs is kept."""
    model = [layer for _ in range(2) for layer in (nn.Linear(6, 6), Holding())]
    at_weight_grad: list[int] = []
    with pipeline(model, schedule=schedule_named("apart", 2, 4)) as pipe:
        pipe.step(X, Y)
        holding = model[1]
        assert isinstance(holding, Holding)
        weight = model[0].weight
        assert isinstance(weight, nn.Parameter)
        weight.register_post_accumulate_grad_hook(lambda _: at_weight_grad.append(len(holding.tokens)))
        pipe.step(X, Y)
    assert at_weight_grad == [0, 0, 0, 0]


class _Buffered(torch.autograd.Function):
    """The identity, into memory whose life can be watched; saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "Buffered") -> Tensor:
        buffer = array.array("f", x.flatten().tolist())
        layer.handed.append(weakref.ref(buffer))
        ctx.layer, ctx.number = layer, len(layer.handed) - 1
        return torch.frombuffer(buffer, dtype=torch.float32).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        before = ctx.layer.handed[: ctx.number]
        ctx.layer.alive_at_backward.append(sum(buffer() is not None for buffer in before))
        return grads[0], None


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.handed: list[weakref.ref[Any]] = []
        self.alive_at_backward: list[int] = []  # of the microbatches before: those that are still there

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Buffered.apply(x, self)  # type: ignore[no-untyped-call]
        return y


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-v"])
def test_what_was_handed_on_does_not_stay_alive_where_it_was_made(schedule: str) -> None:
    """When a gradient comes back, the next stage has let go of its inputs up to then, and nobody else holds them."""
    buffered = Buffered()
    model = [nn.Linear(6, 6), buffered, *(nn.Linear(6, 6) for _ in range(6))]
    partition = [2, 2, 2, 2] if schedule == "zb-v" else [2, 6]
    with pipeline(model, schedule=schedule, partition=partition) as pipe:
        pipe.step(X, Y)
        if schedule != "zb-v":  # there a W of the next stage may still need them, and runs when it likes
            assert buffered.alive_at_backward == [0] * 4
        assert [buffer() for buffer in buffered.handed] == [None] * 4


def test_outputs_live_as_long_as_the_result_that_was_asked_for_them() -> None:
    buffered = Buffered()
    with pipeline([nn.Linear(6, 6), buffered], microbatches=1) as pipe:
        pipe.step(X, Y)
        assert buffered.handed[0]() is None
        result = pipe.evaluate(X)
        assert result.outputs.shape == (8, 6)
        del result
        assert buffered.handed[1]() is None


@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_a_failed_call_lets_go_of_its_batch(call: str) -> None:
    def fail(x: Tensor) -> Tensor:
        raise ZeroDivisionError

    buffer = array.array("f", [0.0] * 48)
    seen = weakref.ref(buffer)
    x = torch.frombuffer(buffer, dtype=torch.float32).view(8, 6)
    del buffer
    with pipeline([nn.Linear(6, 6), Do(fail)]) as pipe:
        with contextlib.suppress(ZeroDivisionError):
            getattr(pipe, call)(x, Y)
        del x
        assert seen() is None


def test_a_result_holds_no_graph() -> None:
    with pipeline() as pipe:
        for result in (pipe.step(X, Y, outputs=True), pipe.evaluate(X, Y)):
            assert result.loss is not None
            for tensor in (result.loss, *result.losses, result.outputs):
                assert not tensor.requires_grad
                assert tensor.grad_fn is None
