"""A traced model is compiled piece by piece: names, bits and draws stay, whether compile= asks for it or the model came
from torch.compile.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.errors import ConfigError
from gapless.model.reference import Reference
from gapless.stage.compiled import is_compiled
from tests.model.training import assert_exact, assert_same, assert_same_state

WIDTH = 6
EAGER: Any = {
    "backend": "aot_eager"
}  # through all of torch.compile but its kernels, so the bits are those of the plain loop


pytestmark = pytest.mark.usefixtures("compiled_anew")


class Net(nn.Module):
    """No sequence: a skip from the first layer to the last."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.p = p

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.first(x))
        z = F.dropout(self.norm(y) * 2 + y, self.p, self.training)
        with torch.no_grad():
            scale = y.abs().mean()
        return self.last(z) * scale + y


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, **options)


def made(p: float = 0.0) -> Net:
    torch.manual_seed(2)
    return Net(p)


def batches(count: int = 2) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    return [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(count)]


@pytest.mark.filterwarnings("ignore:compiled layers can")
@pytest.mark.parametrize(
    ("schedule", "remat"), [("zb-v", "stage"), pytest.param("1f1b", "none", marks=pytest.mark.slow)]
)
def test_pieces_of_a_traced_model_are_compiled_and_have_the_bits_of_its_own_loop(schedule: str, remat: str) -> None:
    assert_exact(made(), batches(), loss=F.mse_loss, microbatches=2, schedule=schedule, remat=remat, compile=EAGER)


@pytest.mark.filterwarnings("ignore:compiled layers can")
def test_a_stage_keeps_and_replays_the_buffers_of_its_own_piece_alone() -> None:
    """The stage that counts a norm's batches put copies in place of its averages, while another stage moved them."""
    options: Any = {"schedule": "zb-v", "remat": "stage", "compile": EAGER}
    with gapless.Pipeline(made(), devices=2, microbatches=2, loss=F.mse_loss, **options) as pipe:
        pipe.step(*batches()[0])
        stages = [pipe._staged.stages[number] for number in range(4)]
        changing = [{name for cell in stage._cells for _, name in cell.changing} for stage in stages]
    assert changing == [{"num_batches_tracked"}, {"running_mean", "running_var"}, set(), set()]


@pytest.mark.filterwarnings("ignore:compiled layers can")
@pytest.mark.parametrize("schedule", ["zb-v", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_draws_between_compiled_parts_keep_their_seeds(schedule: str) -> None:
    ours = made(0.4)
    plain = copy.deepcopy(ours)
    reference = Reference(plain)
    with gapless.Pipeline(
        ours, devices=2, schedule=schedule, microbatches=2, loss=F.mse_loss, seed=5, compile=EAGER
    ) as pipe:
        for step, (x, y) in enumerate(batches()):
            losses = pipe.step(x, y).losses
            wanted = reference.step(x, y, loss=F.mse_loss, microbatches=2, seed=5, step=step)
            assert_same(losses, wanted.losses, f"step {step}")
            assert_same_state(ours, plain, f"step {step}")


def test_a_model_from_torch_compile_is_compiled_in_pieces_and_keeps_its_names() -> None:
    """It was traced and run uncompiled without a word, and its parameters were called _orig_mod.first.weight."""
    model = made()
    plain = copy.deepcopy(model)
    with gapless.Pipeline(
        compiled(model, **EAGER),
        devices=2,
        microbatches=2,
        loss=F.mse_loss,
    ) as pipe:
        assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in plain.named_parameters()]
        assert pipe.state_dict().keys() == plain.state_dict().keys()
        assert pipe.module() is model
        (x, y), *_ = batches()
        losses = pipe.step(x, y).losses
        assert all(is_compiled(layer) for stage in pipe._staged.stages.values() for layer in stage.layers)
        assert pipe.compile_seconds > 0
    wanted = gapless.plain_step(compiled(plain, **EAGER), x, y, loss=F.mse_loss, microbatches=2)
    assert_same(losses, wanted.losses, "losses")
    assert_same_state(model, plain, "gradients")


def test_a_sequence_from_torch_compile_is_compiled_layer_by_layer_with_its_options() -> None:
    torch.compiler.reset()  # torch compiles a function only so many times, and other tests have compiled linear layers
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(model)
    used: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        used.append(graph)
        return graph.forward

    (x, y), *_ = batches()
    with gapless.Pipeline(
        compiled(model, backend=backend),
        devices=2,
        microbatches=2,
        loss=F.mse_loss,
    ) as pipe:
        assert [name for name, _ in pipe.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
        losses = pipe.step(x, y).losses
    assert len(used) >= 3
    wanted = gapless.plain_step(plain, x, y, loss=F.mse_loss, microbatches=2)
    assert_same(losses, wanted.losses, "losses")
    assert_same_state(model, plain, "gradients")


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def with_a_compiled_part() -> nn.Module:
    model = made()
    model.last = torch.compile(model.last, backend="aot_eager")  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: compiled_in_place(made()),
            r"this Net was compiled as a whole, .* leave out its compile\(\) and give compile=True, .* every stage",
        ),
        (
            lambda: compiled_in_place(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))),
            r"this Sequential was compiled as a whole, .* which compile every layer",
        ),
        (
            with_a_compiled_part,
            r"last of this Net is compiled, but a traced model is not: leave it uncompiled and give compile=True",
        ),
    ],
)
def test_what_would_be_run_uncompiled_is_refused(model: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gapless.Pipeline(model(), devices=2, microbatches=2, loss=F.mse_loss)
