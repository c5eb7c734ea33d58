"""What a layer keeps in an attribute is not for others to read: refused with the way out, where it would go wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.errors import GaplessError
from gapless.stage.stored import Stored, Tripwire

WIDTH = 6


class Keeps(nn.Module):
    """As layers with routers are written."""

    def __init__(self, kind: str = "graph") -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind
        self.aux: Any = torch.zeros(())
        self.auxs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.linear(x))
        aux = y.pow(2).mean()
        self.aux = aux if self.kind == "graph" else aux.detach()
        self.auxs = [self.aux]
        return y


def sequence(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Keeps(kind) for _ in range(3)), nn.Linear(WIDTH, WIDTH))


def rows() -> tuple[Tensor, Tensor]:
    return torch.randn(8, WIDTH), torch.randn(8, WIDTH)


@pytest.mark.parametrize("kind", ["graph", "detached"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_loss_that_reads_what_a_layer_of_another_stage_has_stored_is_refused(kind: str, schedule: str) -> None:
    """Detached, it was another microbatch's, without a word; with its graph it failed in the backward."""
    model = sequence(kind)

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        kept: Any = sum(part.aux for part in model.modules() if isinstance(part, Keeps))
        total: Tensor = F.mse_loss(outputs, target) + 0.1 * kept
        return total

    with (
        gapless.Pipeline(model, devices=2, schedule=schedule, microbatches=4, loss=loss) as pipe,
        pytest.raises(GaplessError, match=r"keeps a tensor in Keeps.aux.*return it from the layer.*gapless.aux_loss"),
    ):
        pipe.step(*rows())


class Reads(nn.Module):
    def __init__(self, other: Keeps) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.stack(self.others[0].auxs).sum()


def test_so_is_a_layer_that_reads_it_from_a_list() -> None:
    first = Keeps("detached")
    model = nn.Sequential(first, nn.Linear(WIDTH, WIDTH), Reads(first), nn.Linear(WIDTH, WIDTH))
    with (
        gapless.Pipeline(model, devices=2, partition=[2, 2], microbatches=4, loss=F.mse_loss) as pipe,
        pytest.raises(GaplessError, match=r"keeps a tensor in Keeps.aux"),
    ):
        pipe.step(*rows())


def test_what_is_stored_and_read_in_one_place_is_exact() -> None:
    """The loss and the layer are in the same stage, so it is the microbatch's own."""
    torch.manual_seed(0)
    kept = Keeps()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), kept)
    plain = copy.deepcopy(model)
    (x, y), other = rows(), list[Any](plain)[3]
    with gapless.Pipeline(
        model,
        devices=2,
        microbatches=4,
        loss=lambda outputs, target: F.mse_loss(outputs, target) + kept.aux,
        intra_op_threads=torch.get_num_threads(),
    ) as pipe:
        losses = pipe.step(x, y).losses
    for number, (part, goal) in enumerate(zip(x.tensor_split(4), y.tensor_split(4), strict=True)):
        loss = F.mse_loss(plain(part), goal) + other.aux
        assert torch.equal(losses[number], loss)
        (loss * 0.25).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


def test_storing_alone_is_nobodys_business_and_can_be_logged_after_the_step() -> None:
    model = sequence("detached")
    shared = torch.ones(())
    for part in model:
        part.scale = shared  # one tensor, which all layers have
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=lambda a, b: F.mse_loss(a, b) * shared) as pipe:
        pipe.step(*rows())
        assert float(model[0].aux) > 0  # type: ignore[arg-type]


class Net(nn.Module):
    """Traced: its forward runs no more, and stores nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Keeps(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.first(x)) + x
        return made


def test_a_loss_that_reads_what_a_traced_model_would_have_stored_is_refused() -> None:
    """It read the zero from the constructor."""
    model = Net()
    before = model.first.aux
    with (
        gapless.Pipeline(
            model, devices=2, microbatches=2, loss=lambda outputs, target: F.mse_loss(outputs, target) + model.first.aux
        ) as pipe,
        pytest.raises(
            GaplessError, match=r"Keeps.aux is set by the forward of a model that was traced.*gapless.aux_loss"
        ),
    ):
        pipe.step(*rows())
    assert model.first.aux is before
    with gapless.Pipeline(model, devices=2, microbatches=2, loss=F.mse_loss) as pipe:
        pipe.step(*rows())


def test_what_is_stored_outside_of_modules_fails_with_a_hint() -> None:
    kept: list[Tensor] = [torch.zeros(())]

    def store(_: Any, __: Any, outputs: Tensor) -> None:
        kept[0] = outputs.pow(2).mean()

    model = sequence("detached")
    model[0].register_forward_hook(store)
    with (
        gapless.Pipeline(
            model, devices=2, microbatches=4, loss=lambda outputs, target: F.mse_loss(outputs, target) + kept[0]
        ) as pipe,
        pytest.raises(RuntimeError, match="second time") as failed,
    ):
        pipe.step(*rows())
    assert "gapless.aux_loss" in failed.value.__notes__[0]


def test_tripwires_of_forwards_that_overlap_are_gone_afterwards() -> None:
    """Two stages on two devices: the one that began last put back the other's tripwire."""
    module = Keeps()
    before = module.aux
    stored = Stored(never_set=lambda: [(module, "aux")])
    first, second = stored.tripped(), stored.tripped()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert isinstance(module.aux, Tripwire)
    second.__exit__(None, None, None)
    assert module.aux is before
