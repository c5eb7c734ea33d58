"""Compiled layers in a pipeline: the bits of the same layers compiled in the plain loop, whatever they draw."""

from __future__ import annotations

import contextlib
import copy
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import gapless
from gapless.errors import ConfigError
from gapless.stage.compiled import CompiledCalls, is_compiled
from gapless.stage.random.draws import Draws
from gapless.zoo.gpt import gpt, next_token_loss
from tests.pipelines import assert_same, assert_same_gradients

SEED = 5


def on_a_gpu(test: Any) -> Any:
    skipped = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
    return pytest.mark.gpu(skipped(pytest.mark.timeout(300)(test)))


pytestmark = pytest.mark.usefixtures("compiled_anew")


class Block(nn.Module):
    """Draws in a way that only its code tells."""

    def __init__(self, width: int = 6, p: float = 0.0) -> None:
        super().__init__()
        self.linear, self.p = nn.Linear(width, width), p

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(torch.tanh(self.linear(x)), self.p, self.training)


def blocks(p: float = 0.0, count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(p=p) for _ in range(count)))


def assert_exact(layers: list[Any], reference: list[Any], *, samples: int = 8, steps: int = 2, **options: Any) -> Any:
    """Steps without zero_grad: losses, outputs and gradients are those of the plain loop over `reference`."""
    with gapless.Pipeline(layers, microbatches=4, loss=F.mse_loss, seed=SEED, **options) as pipe:
        for step in range(steps):
            torch.manual_seed(step)
            x, y = torch.randn(samples, 6), torch.randn(samples, 6)
            before = torch.get_rng_state()
            ours = pipe.step(x, y, outputs=True)
            assert torch.equal(before, torch.get_rng_state()), "torch's default generator was moved"
            plain = gapless.plain_step(reference, x, y, loss=F.mse_loss, microbatches=4, seed=SEED, step=step)
            assert_same(ours.losses, tuple(plain.losses), f"step {step}, losses")
            assert_same(ours.outputs, plain.outputs, f"step {step}, outputs")
            assert_same_gradients(layers, reference, f"step {step}")
        return pipe


@pytest.mark.parametrize(
    ("schedule", "devices", "remat", "p"),
    [("1f1b", 4, "none", 0.3), ("gpipe", 2, "stage", 0.0), ("interleaved", 2, "layer", 0.3), ("zb-v", 2, "stage", 0.3)],
)
def test_compiled_layers_give_the_bits_of_the_plain_loop(schedule: str, devices: int, remat: str, p: float) -> None:
    model = blocks(p)
    ours = [torch.compile(layer, backend="aot_eager") for layer in copy.deepcopy(model)]
    plain = [torch.compile(layer, backend="aot_eager") for layer in model]
    assert_exact(ours, plain, schedule=schedule, devices=devices, remat=remat)


def test_uneven_microbatches_compile_once_for_each_size_and_are_exact() -> None:
    model = blocks(0.2, count=3)
    ours = [torch.compile(layer, backend="aot_eager") for layer in copy.deepcopy(model)]
    plain = [torch.compile(layer, backend="aot_eager") for layer in model]
    assert_exact(ours, plain, schedule="1f1b", devices=3, samples=10)


@pytest.mark.slow
def test_inductors_kernels_and_its_own_random_numbers_are_exact_too() -> None:
    model = blocks(0.3)
    plain = [torch.compile(layer, dynamic=False) for layer in copy.deepcopy(model)]
    pipe = assert_exact([*model], plain, schedule="1f1b", devices=2, compile={"dynamic": False})
    assert pipe.compile_seconds > 0


def test_a_pipeline_compiles_each_layer_and_keeps_the_names() -> None:
    model, eager = blocks(), blocks()
    names = [name for name, _ in eager.named_parameters()]
    with gapless.Pipeline(model, devices=2, microbatches=2, loss=F.mse_loss, compile={"backend": "aot_eager"}) as pipe:
        assert [name for name, _ in pipe.named_parameters()] == names
        assert pipe.compile_seconds == 0
        pipe.step(torch.randn(4, 6), torch.randn(4, 6))
        cold = pipe.compile_seconds
        assert cold > 0
        pipe.step(torch.randn(4, 6), torch.randn(4, 6))
        assert pipe.compile_seconds == cold, "what is compiled once stays compiled"
        assert f"2 compiled in {pipe._staged.stages[0].calls.compile_seconds:.1f} s" in repr(pipe)
        x = torch.randn(4, 6)
        assert torch.allclose(pipe.evaluate(x).outputs, model.eval()(x))
    assert not any(is_compiled(layer) for layer in model), "the user's model stays as it is"


def test_a_layer_compiled_in_place_and_one_with_a_compiled_part_are_seen() -> None:
    plain = nn.Linear(6, 6)
    in_place = nn.Linear(6, 6)
    in_place.compile(backend="aot_eager")
    inner: Any = torch.compile(nn.ReLU(), backend="aot_eager")
    part = nn.Sequential(nn.Linear(6, 6), inner)
    function = torch.compile(torch.tanh, backend="aot_eager")
    assert [is_compiled(layer) for layer in (plain, in_place, part, function)] == [False, True, True, True]


def test_a_part_that_is_compiled_inside_a_layer_is_exact() -> None:

    def layers(model: nn.Sequential) -> list[Any]:
        inner: list[Any] = [torch.compile(layer, backend="aot_eager") for layer in model]
        return [nn.Sequential(nn.Dropout(0.2), layer) for layer in inner]

    model = blocks(0.2)
    assert_exact(layers(copy.deepcopy(model)), layers(model), schedule="zb-h1", devices=2)


@pytest.mark.parametrize("p", [0.0, 0.3], ids=["without draws", "with dropout"])
def test_what_torch_compiles_anew_for_is_learnt_anew(p: float) -> None:
    """A call that compiled unseen would put back torch's generators while another device draws from them."""
    block = Block(p=p)
    layer: Any = torch.compile(block, backend="aot_eager")
    calls, x, device = CompiledCalls(layer), torch.randn(2, 6), torch.device("cpu")

    def cold() -> bool:
        return calls(layer, (x,), Draws(SEED), device)[1]

    assert [cold(), cold()] == [True, False]
    block.linear.bias.requires_grad_(False)
    assert [cold(), cold()] == [True, False]
    with torch.autocast("cpu", torch.bfloat16):
        assert [cold(), cold()] == [True, False]
    with torch.autocast("cpu", torch.float16):
        assert [cold(), cold()] == [True, False]
    block.eval()
    assert [cold(), cold()] == [True, False]
    block.train()
    assert not cold()


def test_a_layer_frozen_between_steps_stays_exact() -> None:
    model = blocks(0.3)
    layers: list[Any] = [torch.compile(layer, backend="aot_eager") for layer in copy.deepcopy(model)]
    reference: list[Any] = [torch.compile(layer, backend="aot_eager") for layer in model]
    with gapless.Pipeline(layers, devices=2, microbatches=4, loss=F.mse_loss, seed=SEED) as pipe:
        for step in range(3):
            for each in (layers, reference):
                each[step].requires_grad_(False)
            x, y = torch.randn(8, 6), torch.randn(8, 6)
            pipe.step(x, y)
            gapless.plain_step(reference, x, y, loss=F.mse_loss, microbatches=4, seed=SEED, step=step)
            assert_same_gradients(layers, reference, f"step {step}")


@on_a_gpu
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_a_compiled_gpt_on_a_gpu_is_exact_where_torch_is_deterministic(
    autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor adds up the gradient of an embedding by atomic operations, in any order, unless torch forbids it."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.manual_seed(0)
    model = gpt(vocab=61, width=64, depth=2, heads=4, context=32, dropout=0.1).cuda()
    reference = copy.deepcopy(model)
    plain = [torch.compile(layer) for layer in reference]
    ids = torch.randint(61, (16, 32), device="cuda")
    options: dict[str, Any] = {"microbatches": 4, "loss": next_token_loss}
    threads = torch.get_num_threads()  # what is compiled for another number of them is compiled anew
    torch.use_deterministic_algorithms(True)
    try:
        with (
            gapless.Pipeline(model, devices=["cuda:0"] * 2, compile=True, intra_op_threads=threads, **options) as pipe,
            torch.autocast("cuda", torch.bfloat16) if autocast else contextlib.nullcontext(),
        ):
            for step in range(3):
                ours = pipe.step(ids, ids)
                theirs = gapless.plain_step(plain, ids, ids, step=step, **options)
                assert_same(ours.losses, tuple(theirs.losses), f"step {step}")
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_gradients([*model], [*reference], "three steps")


@on_a_gpu
def test_a_compiled_stage_without_parameters_draws_from_the_generator_of_its_gpu() -> None:
    """It was taken for one on the CPU, and drew whatever the GPU's generator had next."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 6)).cuda()
    reference = copy.deepcopy(model)
    compiled = {"backend": "aot_eager"}
    plain: list[Any] = [torch.compile(layer, **compiled) for layer in reference]  # type: ignore[call-overload]
    options: dict[str, Any] = {"microbatches": 4, "loss": F.mse_loss}
    x, y = torch.randn(8, 6, device="cuda"), torch.randn(8, 6, device="cuda")
    with gapless.Pipeline(
        model, devices=["cuda:0"] * 3, partition=[1, 1, 1], compile=compiled, seed=SEED, **options
    ) as pipe:
        for step in range(2):
            pipe.step(x, y)
            gapless.plain_step(plain, x, y, seed=SEED, step=step, **options)
    assert_same_gradients([*model], [*reference], "two steps")


def test_a_compiled_loss_is_compiled_while_nobody_draws() -> None:
    model = blocks(0.3)
    reference = copy.deepcopy(model)
    loss: Any = torch.compile(F.mse_loss, backend="aot_eager")
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=loss, seed=SEED) as pipe:
        pipe.step(x, y)
        assert pipe.compile_seconds > 0
    gapless.plain_step(reference, x, y, loss=loss, microbatches=4, seed=SEED)
    assert_same_gradients([*model], [*reference], "one step")


def test_a_compiled_loss_that_draws_is_refused() -> None:
    def noisy(outputs: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(F.dropout(outputs), target)

    loss: Any = torch.compile(noisy, backend="aot_eager")
    with (
        gapless.Pipeline(blocks(), devices=2, microbatches=4, loss=loss) as pipe,
        pytest.raises(ConfigError, match="a compiled loss draws random numbers"),
    ):
        pipe.step(torch.randn(8, 6), torch.randn(8, 6))


def test_a_stage_runs_what_is_compiled_while_another_one_compiles() -> None:
    """Torch before 2.13 took the call for a part of the other thread's trace, and refused it."""
    has_begun, may_end = threading.Event(), threading.Event()
    before: list[Tensor] = []

    def traced(x: Tensor) -> Tensor:
        has_begun.set()
        assert may_end.wait(20)
        return x

    def backend(graph: Any, inputs: Any) -> Any:
        make_fx(traced)(torch.ones(1))
        return graph

    def begin(x: Tensor) -> Tensor:
        before.append(x)
        assert len(before) == 1 or has_begun.wait(20)
        return x

    def end(x: Tensor) -> Tensor:
        if len(before) == 2:
            may_end.set()
        return x

    model = blocks(count=2)
    compiled = [torch.compile(model[0], backend="eager"), torch.compile(model[1], backend=backend)]
    layers: list[Any] = [begin, compiled[0], end, compiled[1]]
    with gapless.Pipeline(layers, partition=[3, 1], microbatches=2, loss=F.mse_loss, devices=2) as pipe:
        pipe.step(torch.randn(8, 6), torch.randn(8, 6))
    assert len(before) == 2


def test_batch_norm_that_cannot_be_seen_is_not_deferred() -> None:
    layers: list[Any] = [torch.compile(nn.BatchNorm1d(6)), nn.Linear(6, 6)]
    with pytest.raises(ConfigError, match="a compiled layer can't defer the statistics of its batch norm"):
        gapless.Pipeline(layers, devices=2, microbatches=2, loss=F.mse_loss, batchnorm="deferred")


TWICE = """
import ctypes, torch, torch.nn.functional as F, gapless
malloc = ctypes.pythonapi.PyMem_RawMalloc
malloc.restype = ctypes.c_void_p
layers = [torch.compile(torch.nn.Linear(4, 4), backend="aot_eager") for _ in range(2)]
with gapless.Pipeline(layers, devices=2, microbatches=2, loss=F.mse_loss) as pipe:
    pipe.step(torch.randn(4, 4), torch.randn(4, 4))
for _ in range(20000):  # what the threads have let go of belongs to others now
    ctypes.memset(ctypes.c_void_p(malloc(8)), 0x41, 8)
torch.export.export(torch.nn.Linear(4, 4), (torch.randn(2, 4),))
"""


@pytest.mark.skipif(torch.version.cuda is None or torch.cuda.is_available(), reason="needs CUDA's torch and no GPU")
def test_after_the_threads_that_compiled_have_ended_torch_can_trace() -> None:
    """It crashed: torch 2.11 goes by something that had ended with them."""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", TWICE], check=False).returncode == 0
