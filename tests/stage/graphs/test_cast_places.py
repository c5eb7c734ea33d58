"""On an NVIDIA GPU: CUDA graphs under autocast and of compiled layers have the bits of a loop as people write it."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gapless import Pipeline, plain_step
from gapless.stage.graphs.cast_places import CastPlaces
from gapless.zoo.gpt import gpt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("error:stage"),
]
STEPS, MICROBATCHES, VOCAB = 6, 4, 61


def tokens_loss(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1).float(), target.flatten())


def model_of(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return gpt(vocab=VOCAB, width=64, depth=4, heads=4, context=32, dropout=dropout).cuda()


def batch(step: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    x, y = (torch.randint(0, VOCAB, (2 * MICROBATCHES, 32), generator=made).cuda() for _ in range(2))
    return x, y


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def loop(layers: Any, weights: nn.Module, low: torch.dtype | None) -> list[Any]:
    """Losses and weights after every step of a plain loop over microbatches."""
    optimizer, found = optimizer_of(weights), []
    scaler = torch.amp.GradScaler("cuda", enabled=low is torch.float16)
    for step in range(STEPS):
        x, y = batch(step)
        total = torch.zeros((), device="cuda")
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            with torch.autocast("cuda", low, enabled=low is not None):
                value = part
                for layer in layers:
                    value = layer(value)
                loss = tokens_loss(value, target)
            scaler.scale(loss * (1 / MICROBATCHES)).backward()
            total += loss.detach() * (1 / MICROBATCHES)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append([total, *(each.detach().clone() for each in weights.parameters())])
    return found


def pipelined(model: Any, weights: nn.Module, low: torch.dtype | None, **options: Any) -> tuple[list[Any], str]:
    """The same by a pipeline, and what it says of itself."""
    optimizer, found = optimizer_of(weights), []
    scaler = torch.amp.GradScaler("cuda", enabled=low is torch.float16)
    with Pipeline(
        model, devices=["cuda:0"] * 2, microbatches=MICROBATCHES, loss=tokens_loss, graphs=True, **options
    ) as pipe:
        for step in range(STEPS):
            with torch.autocast("cuda", low, enabled=low is not None):
                result = pipe.step(*batch(step), scaler=scaler if scaler.is_enabled() else None)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append([result.loss, *(each.detach().clone() for each in weights.parameters())])
        return found, repr(pipe)


def assert_equal(ours: list[Any], theirs: list[Any]) -> None:
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert torch.equal(a.to(b.dtype), b), f"step {step}, {'loss' if not number else f'weight {number - 1}'}"


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("remat", ["none", "stage", "layer"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_under_autocast_graphs_have_the_bits_of_a_plain_loop(schedule: str, remat: Any, low: torch.dtype) -> None:
    model, reference = model_of(), model_of()
    ours, said = pipelined(model, model, low, schedule=schedule, remat=remat)
    assert "no graphs" not in said, said
    assert_equal(ours, loop(reference, reference, low))


def test_under_autocast_dropout_draws_as_without_graphs() -> None:
    model, reference = model_of(0.1), model_of(0.1)
    ours, _ = pipelined(model, model, torch.bfloat16, schedule="zb-h1")
    optimizer = optimizer_of(reference)
    for step, (loss, *_) in enumerate(ours):
        with torch.autocast("cuda", torch.bfloat16):
            plain = plain_step(reference, *batch(step), loss=tokens_loss, microbatches=MICROBATCHES, step=step)
        assert torch.equal(loss, plain.loss), step
        optimizer.step()
        optimizer.zero_grad()


class Doubles(nn.Linear):
    """Changes the cast of its weight in place."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), self.weight.to(torch.bfloat16).mul_(2), None).to(x.dtype)


def test_a_cast_that_is_changed_in_place_is_not_read_by_others() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Doubles(16, 16, bias=False), nn.Linear(16, VOCAB)).cuda()
    reference, x = copy.deepcopy(model), torch.randn(8, 16, device="cuda")
    y = torch.randint(0, VOCAB, (8,), device="cuda")
    with Pipeline(model, devices=["cuda:0"], microbatches=4, loss=F.cross_entropy, graphs="auto") as pipe:
        for step in range(STEPS):
            with torch.autocast("cuda", torch.bfloat16):
                pipe.step(x, y)
                for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
                    (F.cross_entropy(reference(part), target) * 0.25).backward()
            for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.equal(ours.grad, theirs.grad), step  # type: ignore[arg-type]
        assert "no graphs: a layer changes the cast of a weight in place" in repr(pipe), repr(pipe)


def test_a_place_is_filled_after_torch_has_filled_its_memory_with_nan() -> None:
    x = torch.randn(4, 64, device="cuda")
    for late in (1, 1_000_000_000):  # kernels are loaded when they first run, which waits for the GPU
        layer = nn.Linear(64, 64, bias=False).cuda()
        places = CastPlaces(list(layer.parameters()))
        torch.cuda.synchronize()
        with torch.cuda.stream(places._stream):
            torch.cuda._sleep(late)
        with torch.autocast("cuda", torch.bfloat16), places:
            layer(x)
        places.fill()
        torch.cuda.synchronize()
        (place,) = places.places()
        assert torch.equal(place, layer.weight.bfloat16())


@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_graphs_of_compiled_layers_have_the_bits_of_a_plain_loop_over_them(
    schedule: str, low: torch.dtype | None
) -> None:
    torch.compiler.reset()
    model, reference = model_of(), model_of()
    ours, said = pipelined(model, model, low, schedule=schedule, compile=True)
    assert "no graphs" not in said, said
    compiled = [torch.compile(layer) for layer in reference]
    assert_equal(ours, loop(compiled, reference, low))


def test_dropout_in_compiled_layers_draws_as_without_graphs() -> None:
    torch.compiler.reset()
    found: list[Any] = []
    for graphs in (True, False):
        model = model_of(0.1)
        run = functools.partial(Pipeline, model, devices=["cuda:0"] * 2, microbatches=MICROBATCHES, loss=tokens_loss)
        with run(compile=True, graphs=graphs) as pipe:
            optimizer = optimizer_of(model)
            for step in range(STEPS):
                loss = pipe.step(*batch(step)).loss
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss)
            assert not graphs or "no graphs" not in repr(pipe), repr(pipe)
    for ours, theirs in zip(found[:STEPS], found[STEPS:], strict=True):
        assert torch.equal(ours, theirs)
