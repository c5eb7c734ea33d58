"""What holds in a forward holds in all of it, and nowhere else."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import gapless
from gapless.model.fidelity.traced_forward import in_forward
from tests.pipelines import Own


class Asks(nn.Module):
    """Calls itself as often as it is told to, and torch before and after."""

    def forward(self, x: Tensor, again: int = 0) -> Tensor:
        x = torch.sin(x)
        return torch.cos(self(x, again - 1) if again else x)


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func.__name__)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def noted(notes: list[str]) -> Iterator[None]:
    notes.append("entered")
    yield
    notes.append("left")


def test_a_mode_sees_the_forward_and_the_users_hooks_and_nothing_else() -> None:
    model, seen = Asks(), Seen()
    model.register_forward_pre_hook(lambda *call: (torch.tanh(call[-1][0]),))
    model.register_forward_hook(lambda *call: torch.exp(call[-1]))
    with in_forward(model, lambda: seen):
        torch.abs(model(torch.ones(2).neg()))
    assert seen.calls == ["tanh", "sin", "cos", "exp"]
    model(torch.ones(2))
    assert len(seen.calls) == 4


def test_a_model_that_calls_itself_is_watched_to_its_end() -> None:
    model, notes = Asks(), list[str]()
    with in_forward(model, lambda: noted(notes)):
        model(torch.ones(2), 1)
        assert notes == ["entered", "entered", "left", "left"]
    seen = Seen()
    with in_forward(model, lambda: seen):
        model(torch.ones(2), 1)
    assert seen.calls[-1] == "cos"  # of the outer call


@pytest.mark.parametrize("traced", [False, True])
def test_a_forward_that_fails_leaves_all_that_was_entered(traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it traces, torch does not call the hooks of a module whose forward fails."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: traced)
    model, seen = Asks(), Seen()
    with pytest.raises(TypeError), in_forward(model, lambda: seen):
        model("no tensor")
    before = len(seen.calls)
    torch.ones(2).sin()
    assert len(seen.calls) == before


def test_a_forward_hook_that_records_is_told_of() -> None:
    seen, parts = list[int](), {"first": nn.Linear(6, 6), "last": nn.Linear(6, 6)}
    model: Any = Own(lambda model, x: model.last(torch.tanh(model.first(x))), **parts)
    model.first.register_forward_hook(lambda _, args, out: seen.append(1))
    x = torch.randn(8, 6)
    with (
        gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss) as pipe,
        pytest.warns(UserWarning, match="a forward hook of first runs when the model is traced, not for each"),
    ):
        pipe.step(x, x)
