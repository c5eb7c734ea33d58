"""Auxiliary losses, as the routers of experts have them: added to the loss of their own microbatch, on any stage."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gapless
from gapless.errors import GaplessError
from tests.pipelines import assert_same_gradients, schedule_named

WIDTH = 6


class Experts(nn.Module):
    """Two experts and a router, which is to use both alike."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.checkpointed = checkpointed
        self.aux: Any = None

    def forward(self, x: Tensor) -> Any:
        if self.checkpointed:
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        shares = torch.softmax(self.router(x), -1)
        self.aux = gapless.aux_loss(0.3 * shares.mean(0).pow(2).sum())
        chosen = [expert(x) * share for expert, share in zip(self.experts, shares.split(1, -1), strict=True)]
        return x + torch.tanh(chosen[0] + chosen[1])


class Net(nn.Module):
    """The same as no sequence, so it is traced."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = x
        for layer in self.layers:
            y = layer(y)
            setattr(layer, "aux", None)  # noqa: B010 (a trace takes no tensors that are stored)
        return self.head(y) + x


def sequence(depth: int = 4, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Experts(**options) for _ in range(depth)), nn.Linear(WIDTH, WIDTH))


def aux_of(model: nn.Module) -> Iterator[Tensor]:
    return (part.aux for part in model.modules() if isinstance(part, Experts))


def plain_loop(model: nn.Module, x: Tensor, y: Tensor, context: Any = nullcontext, scale: float = 1.0) -> list[Tensor]:
    """What anybody would write. It shares no code with a pipeline."""
    losses = []
    for part, goal in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        with context():
            loss = F.mse_loss(model(part), goal) + sum(aux_of(model))
        losses.append(loss.detach())
        (loss * (len(part) / len(x) * scale)).backward()
    return losses


def assert_exact(model: nn.Module, plain: nn.Module, *, context: Any = nullcontext, **options: Any) -> None:
    torch.manual_seed(1)
    threads = torch.get_num_threads()
    with gapless.Pipeline(model, microbatches=4, loss=F.mse_loss, intra_op_threads=threads, **options) as pipe:
        for step in range(2):
            x, y = torch.randn(10, WIDTH), torch.randn(10, WIDTH)
            with context():
                result = pipe.step(x, y)
            losses = plain_loop(plain, x, y, context)
            for ours, other in zip(result.losses, losses, strict=True):
                assert torch.equal(ours, other), f"step {step}"
            assert_same_gradients(model, plain, f"step {step}")


@pytest.mark.parametrize(
    ("schedule", "devices", "remat"),
    [
        ("gpipe", 2, "layer"),
        ("1f1b", 3, "stage"),
        ("interleaved", 2, "none"),
        ("zb-v", 2, "stage"),
        ("zb-h1", 4, "none"),
        ("apart", 3, "layer"),
    ],
)
def test_auxiliary_losses_of_any_stage_have_the_bits_of_the_plain_loop(schedule: str, devices: int, remat: Any) -> None:
    """A loss that read what the layers had stored got another microbatch's, or failed in the backward."""
    model = sequence()
    assert_exact(
        model, copy.deepcopy(model), schedule=schedule_named(schedule, devices, 4), devices=devices, remat=remat
    )


def bfloat16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.slow
def test_compiled_layers_may_add_them() -> None:
    model = sequence(depth=2)  # one for each stage
    assert_exact(model, copy.deepcopy(model), devices=2, compile={"backend": "aot_eager"}, partition=[1, 2])


def test_under_autocast_and_with_checkpoints_inside_a_layer_too() -> None:
    model = sequence(checkpointed=True)
    plain = copy.deepcopy(model)
    assert_exact(model, plain, schedule="zb-v", devices=2)
    model = sequence()
    assert_exact(model, copy.deepcopy(model), schedule="1f1b", devices=2, context=bfloat16)


class Summed(nn.Module):
    """The traced model's own loop: what its layers add, kept by itself."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, aux = x, list[Any]()
        for layer in self.net.layers:
            y = layer(y)
            aux.append(layer.aux)
        return self.net.head(y) + x, sum(aux)


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize(("schedule", "remat", "compile"), [("zb-v", "stage", False), ("gpipe", "none", True)])
def test_a_traced_model_may_have_them_anywhere(schedule: str, remat: Any, compile: bool) -> None:
    model = Net()
    plain = Summed(copy.deepcopy(model))
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    with gapless.Pipeline(
        model,
        devices=2,
        schedule=schedule,
        remat=remat,
        compile={"backend": "aot_eager"} if compile else False,
        microbatches=4,
        loss=F.mse_loss,
        intra_op_threads=torch.get_num_threads(),
    ) as pipe:
        losses = pipe.step(x, y).losses
    for number, (part, goal) in enumerate(zip(x.tensor_split(4), y.tensor_split(4), strict=True)):
        outputs, aux = plain(part)
        loss = F.mse_loss(outputs, goal) + aux
        assert torch.equal(losses[number], loss)
        (loss * 0.25).backward()
    assert_same_gradients(model, plain)


def test_plain_step_adds_them_too_and_evaluate_leaves_them_out() -> None:
    model = sequence()
    plain = copy.deepcopy(model)
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    result = gapless.plain_step(model, x, y, loss=F.mse_loss, microbatches=4)
    for ours, other in zip(result.losses, plain_loop(plain, x, y), strict=True):
        assert torch.equal(ours, other)
    with gapless.Pipeline(model, devices=2, microbatches=1, loss=F.mse_loss) as pipe, torch.no_grad():
        assert pipe.evaluate(x, y).loss == F.mse_loss(plain(x), y)


def test_a_scaler_scales_them_with_the_loss() -> None:
    model = sequence()
    plain = copy.deepcopy(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    with gapless.Pipeline(
        model, devices=2, microbatches=4, loss=F.mse_loss, intra_op_threads=torch.get_num_threads()
    ) as pipe:
        pipe.step(x, y, scaler=scaler)
    plain_loop(plain, x, y, scale=64.0)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("value", [torch.ones(2), torch.ones((), dtype=torch.int64), 0.5])
def test_anything_but_a_scalar_is_refused(value: Any) -> None:
    with pytest.raises(GaplessError, match=r"aux_loss takes a scalar tensor of floats, but it got .*: reduce it"):
        gapless.aux_loss(value)
    assert gapless.aux_loss(torch.ones(())) == 1.0
