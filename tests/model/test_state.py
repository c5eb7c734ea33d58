"""A traced model whose forward keeps Python state: a trace would keep the value of one batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.errors import PartitionError


class Settings:
    def __init__(self) -> None:
        self.temperature, self.seen = 1.0, list[int]()


class Stateful(nn.Module):
    steps: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind, self.inner = nn.Linear(6, 6), nn.Linear(6, 6), kind, nn.Linear(6, 6)
        self.count, self.seen, self.settings, self.last = 0, list[int](), Settings(), (0, 0)
        self.temperature = 1.0
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        if self.kind == "counter":
            self.count += 1
        elif self.kind == "list":
            self.seen.append(1)
        elif self.kind == "object":
            self.settings.temperature *= 0.9
        elif self.kind == "written only":
            self.last = x.shape[0], 6
        elif self.kind == "set once" and self.settings.temperature == 1.0:
            self.settings.temperature = 0.5
        elif self.kind == "buffer":
            self.steps.add_(1)
        factor = (1 + 0.1 * self.count + len(self.seen)) * self.settings.temperature * self.temperature
        x = torch.tanh(self.a(x) * factor)
        return self.b(self.inner(x)) * (1 + self.steps.clone() if self.kind == "buffer" else 1.0)


def pipeline(model: nn.Module) -> gapless.Pipeline:
    return gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss, intra_op_threads=1)


@pytest.mark.parametrize(("kind", "path"), [("counter", "count"), ("list", "seen"), ("object", "settings.temperature")])
def test_state_that_the_forward_of_a_traced_model_changes_is_refused_and_put_back(kind: str, path: str) -> None:
    """The trace kept the value of the first batch for ever, without a word."""
    model = Stateful(kind)
    with (
        pipeline(model) as pipe,
        pytest.raises(PartitionError, match=rf"the forward of Stateful changes Stateful\.{path}, .* make it a buffer"),
    ):
        pipe.step(torch.randn(8, 6), torch.randn(8, 6))
    assert (model.count, model.seen, model.settings.temperature) == (0, [], 1.0)


def plain(model: Any, x: Tensor, y: Tensor) -> list[list[float]]:
    for part, goal in zip(x.chunk(4), y.chunk(4), strict=True):
        (F.mse_loss(model(part), goal) / 4).backward()
    return [each.grad.tolist() for each in model.parameters()]


@pytest.mark.parametrize("kind", ["none", "written only", "set once"])
def test_what_is_only_read_or_written_or_set_once_does_no_harm(kind: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    ours, theirs = Stateful(kind), Stateful(kind)
    theirs.load_state_dict(ours.state_dict())
    with pipeline(ours) as pipe:
        for temperature in (1.0, 0.5):  # a callback of the user's
            ours.temperature = theirs.temperature = temperature
            ours.zero_grad()
            theirs.zero_grad()
            pipe.step(x, y)
            assert [each.grad.tolist() for each in ours.parameters() if each.grad is not None] == plain(theirs, x, y)
    assert ours.settings.temperature == theirs.settings.temperature


def test_a_model_that_can_t_be_cut_for_its_buffer_says_which() -> None:
    class Whole(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            out: Tensor = self.b(torch.tanh(self.a(x * self.count))) * self.count
            self.count.add_(1)
            return out

    with pipeline(Whole()) as pipe, pytest.raises(PartitionError, match="since its forward changes count, whose uses"):
        pipe.step(torch.randn(8, 6), torch.randn(8, 6))


class ActNorm(nn.Module):
    """Sets its weights from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift, self.initialised = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6)), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.initialised:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0) + 0.1))
            self.initialised = True
        return (x + self.shift) * self.scale


class LooksForAFlag(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "ready"):
            self.scale.copy_(x.detach().abs().max())
            self.ready = True
        return x / self.scale


class FirstScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.detach().abs().max()
        return x / self.scale


class FlaggedScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ready, self.scale = False, torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.scale, self.ready = x.detach().abs().max(), True
        return x / self.scale


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        out = x + self.memory
        self.memory = x.detach().mean(0)
        return out


class OnlyOnce(nn.Module):
    """A mask that is made once, and the first batch goes without it."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.arange(6) % 2
            return x
        return x * self.mask


class MadeOnce(nn.Module):
    """The same, but for all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.arange(6) % 2
        return x * self.mask


class MadeForALength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.length, self.places = 0, torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.length != x.shape[0]:
            self.length, self.places = x.shape[0], torch.arange(x.shape[0])[:, None].float()
        return x + self.places


class LastOutput(nn.Module):
    """For whoever looks after the step."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = x * 2
        return self.last


class With(nn.Module):
    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.a, self.unit, self.b = nn.Linear(6, 6), unit, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.tanh(self.unit(self.a(x))))


@pytest.mark.parametrize(
    ("unit", "message"),
    [
        (
            ActNorm,
            r"sets With\.unit\.initialised and does something else the next time, .*: call the model once before",
        ),
        (LooksForAFlag, r"sets With\.unit\.ready and does something else the next time"),
        (OnlyOnce, r"sets With\.unit\.mask and does something else the next time"),
        (
            FirstScale,
            r"stores a tensor in With\.unit\.scale and reads what an earlier one has stored there, .*: make it a",
        ),
        (FlaggedScale, r"stores a tensor in With\.unit\.scale and reads what an earlier one"),
        (Memory, r"stores a tensor in With\.unit\.memory and reads what an earlier one"),
    ],
)
def test_a_traced_model_that_remembers_is_refused_and_left_as_it_was(unit: type[nn.Module], message: str) -> None:
    """What the first batch sets was never set, or that of no microbatch was used."""
    model = With(unit())
    held = {name: value for name, value in vars(model.unit).items() if not name.startswith("_")}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pipeline(model) as pipe, pytest.raises(PartitionError, match=f"the forward of With {message}"):
        pipe.step(torch.randn(8, 6), torch.randn(8, 6))
    assert {name: value for name, value in vars(model.unit).items() if not name.startswith("_")} == held
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("unit", "called_before"),
    [
        *((unit, True) for unit in (ActNorm, LooksForAFlag, FirstScale, MadeOnce, MadeForALength)),
        *((unit, False) for unit in (MadeOnce, MadeForALength, LastOutput)),
    ],
)
def test_what_a_model_remembers_and_does_not_change_is_that_of_the_plain_loop(
    unit: type[nn.Module], called_before: bool
) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    models = With(unit()), With(unit())
    models[1].load_state_dict(models[0].state_dict())
    if called_before:
        for model in models:
            model(x)
    ours, theirs = models
    with pipeline(ours) as pipe:
        for _ in range(2):
            pipe.step(x, y)
            expected = plain(theirs, x, y)
    assert [each.grad.tolist() for each in ours.parameters() if each.grad is not None] == expected


def test_what_is_stored_in_training_and_read_in_evaluation_is_refused() -> None:
    class InTraining(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torch.zeros(6)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.mean = x.detach().mean(0)
            return x - self.mean

    x, y = torch.randn(8, 6), torch.randn(8, 6)
    with pipeline(With(InTraining())) as pipe:
        pipe.step(x, y)
        with pytest.raises(
            PartitionError, match=r"the forward of With stores a tensor in unit\.mean and reads what an"
        ):
            pipe.evaluate(x, y)
