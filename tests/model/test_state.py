"""A traced model whose forward keeps Python state: a trace would keep the value of one batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.errors import PartitionError
from tests.by_hand import loop
from tests.pipelines import Own


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
    loop(model, x, y)
    return [each.grad.tolist() for each in model.parameters()]


@pytest.mark.parametrize("kind", ["none", "written only", "set once"])
def test_what_is_only_read_or_written_or_set_once_does_no_harm(kind: str) -> None:
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
    def whole(model: Any, x: Tensor) -> Any:
        model.count.add_(1)
        out = model.b(torch.tanh(model.a(x * model.count))) * model.count
        model.count.add_(1)
        return out

    model = Own(whole, a=nn.Linear(6, 6), b=nn.Linear(6, 6), count=nn.Buffer(torch.zeros(())))

    with pipeline(model) as pipe, pytest.raises(PartitionError, match="since its forward changes count, whose uses"):
        pipe.step(torch.randn(8, 6), torch.randn(8, 6))


def act_norm(unit: Any, x: Tensor) -> Any:
    """Sets its weights from the first batch."""
    if not unit.initialised:
        with torch.no_grad():
            unit.shift.copy_(-x.mean(0))
            unit.scale.copy_(1 / (x.std(0) + 0.1))
        unit.initialised = True
    return (x + unit.shift) * unit.scale


def looks_for_a_flag(unit: Any, x: Tensor) -> Any:
    if not hasattr(unit, "ready"):
        unit.scale.copy_(x.detach().abs().max())
        unit.ready = True
    return x / unit.scale


def first_scale(unit: Any, x: Tensor) -> Any:
    if unit.scale is None:
        unit.scale = x.detach().abs().max()
    return x / unit.scale


def flagged_scale(unit: Any, x: Tensor) -> Any:
    if not unit.ready:
        unit.scale, unit.ready = x.detach().abs().max(), True
    return x / unit.scale


def memory(unit: Any, x: Tensor) -> Any:
    out = x + unit.memory
    unit.memory = x.detach().mean(0)
    return out


def only_once(unit: Any, x: Tensor) -> Any:
    """A mask that is made once, and the first batch goes without it."""
    if unit.mask is None:
        unit.mask = torch.arange(6) % 2
        return x
    return x * unit.mask


def made_once(unit: Any, x: Tensor) -> Any:
    """The same, but for all batches."""
    if unit.mask is None:
        unit.mask = torch.arange(6) % 2
    return x * unit.mask


def made_for_a_length(unit: Any, x: Tensor) -> Any:
    if unit.length != x.shape[0]:
        unit.length, unit.places = x.shape[0], torch.arange(x.shape[0])[:, None].float()
    return x + unit.places


def last_output(unit: Any, x: Tensor) -> Any:
    """For whoever looks after the step."""
    unit.last = x * 2
    return unit.last


HELD: dict[Any, Callable[[], dict[str, Any]]] = {
    act_norm: lambda: {
        "scale": nn.Parameter(torch.ones(6)),
        "shift": nn.Parameter(torch.zeros(6)),
        "initialised": False,
    },
    looks_for_a_flag: lambda: {"scale": nn.Buffer(torch.ones(()))},
    first_scale: lambda: {"scale": None},
    flagged_scale: lambda: {"ready": False, "scale": torch.ones(())},
    memory: lambda: {"memory": torch.zeros(6)},
    only_once: lambda: {"mask": None},
    made_once: lambda: {"mask": None},
    made_for_a_length: lambda: {"length": 0, "places": torch.zeros(0)},
    last_output: dict,
}


class With(nn.Module):
    def __init__(self, unit: Any, **held: Any) -> None:
        super().__init__()
        self.a, self.unit, self.b = nn.Linear(6, 6), Own(unit, **held), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.tanh(self.unit(self.a(x))))


@pytest.mark.parametrize(
    ("unit", "message"),
    [
        (
            act_norm,
            r"sets With\.unit\.initialised and does something else the next time, .*: call the model once before",
        ),
        (looks_for_a_flag, r"sets With\.unit\.ready and does something else the next time"),
        (only_once, r"sets With\.unit\.mask and does something else the next time"),
        (
            first_scale,
            r"stores a tensor in With\.unit\.scale and reads what an earlier one has stored there, .*: make it a",
        ),
        (flagged_scale, r"stores a tensor in With\.unit\.scale and reads what an earlier one"),
        (memory, r"stores a tensor in With\.unit\.memory and reads what an earlier one"),
    ],
)
def test_a_traced_model_that_remembers_is_refused_and_left_as_it_was(unit: Any, message: str) -> None:
    """What the first batch sets was never set, or that of no microbatch was used."""
    model = With(unit, **HELD[unit]())
    held = {name: value for name, value in vars(model.unit).items() if not name.startswith("_")}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pipeline(model) as pipe, pytest.raises(PartitionError, match=f"the forward of With {message}"):
        pipe.step(torch.randn(8, 6), torch.randn(8, 6))
    assert {name: value for name, value in vars(model.unit).items() if not name.startswith("_")} == held
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("unit", "called_before"),
    [
        *((unit, True) for unit in (act_norm, looks_for_a_flag, first_scale, made_once, made_for_a_length)),
        *((unit, False) for unit in (made_once, made_for_a_length, last_output)),
    ],
)
def test_what_a_model_remembers_and_does_not_change_is_that_of_the_plain_loop(unit: Any, called_before: bool) -> None:
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    models = With(unit, **HELD[unit]()), With(unit, **HELD[unit]())
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
    def in_training(unit: Any, x: Tensor) -> Any:
        if unit.training:
            unit.mean = x.detach().mean(0)
        return x - unit.mean

    x, y = torch.randn(8, 6), torch.randn(8, 6)
    with pipeline(With(in_training, mean=torch.zeros(6))) as pipe:
        pipe.step(x, y)
        with pytest.raises(
            PartitionError, match=r"the forward of With stores a tensor in unit\.mean and reads what an"
        ):
            pipe.evaluate(x, y)


class Hooking(nn.Module):
    """As Hugging Face's models, which add hooks to their layers when they are first asked for hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.hooked = nn.Linear(4, 4), nn.Linear(4, 4), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.first.register_forward_hook(lambda *call: call[-1] * 2)
            self.hooked = True
        if type(x.shape[1]) is not int:
            raise TypeError("a size that varies")
        return self.second(self.first(x))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:a forward hook of")
def test_hooks_that_a_failed_trace_adds_are_not_there_twice() -> None:
    """Segformer's first trace fails, as no size of an image may vary: the second saw each layer's output twice."""
    model, (x, y) = Hooking(), torch.randn(2, 6, 4)
    plain = copy.deepcopy(model)
    with gapless.Pipeline(model, devices=2, microbatches=3, loss=F.mse_loss) as pipe:
        ours = pipe.step(x, y).losses
    for part, goal, loss in zip(x.chunk(3), y.chunk(3), ours, strict=True):
        assert torch.equal(loss, F.mse_loss(plain(part), goal))
    assert len(model.first._forward_hooks) == 1
