"""Models as people write them when nobody thinks of pipelines: each runs exactly, or is refused with the way out."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.errors import PartitionError
from tests.model.training import assert_exact

WIDTH = 6


class Odd(nn.Module):
    """Some linear layers, used in a way of its own."""

    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))


class NestedDicts(Odd):
    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        x, (ids, more) = batch["deep"]["x"], batch["pair"]
        for part in self.parts:
            x = torch.tanh(part(x)) + more * ids.unsqueeze(1)
        return {"answers": {"y": x, "twice": [2 * x, None]}, "ids": ids}


class SeveralInputsAndOutputs(Odd):
    def forward(self, a: Tensor, b: Tensor, *, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = self.parts[0](a)
        second = self.parts[1](b) * scale
        third = self.parts[2](first) + self.parts[3](second)
        return third, self.parts[4](third * second), first


class CalledTwice(Odd):
    def forward(self, x: Tensor) -> Tensor:
        x = self.parts[0](torch.relu(self.parts[0](x)))
        for part in self.parts[1:]:
            x = part(torch.relu(part(x)))
        return x


class SharedFarApart(Odd):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for part in self.parts:
                x = torch.tanh(part(x)) + x
        return x


class Loop(Odd):
    def forward(self, x: Tensor) -> Tensor:
        states: list[Tensor] = []
        for time in range(4):
            x = torch.tanh(self.parts[time % 2](x)) + sum(states[-2:], torch.zeros_like(x))
            states.append(x)
        return self.parts[4](torch.stack(states).mean(0))  # type: ignore[no-any-return]


class UnusedParameter(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts[:4]:
            x = torch.relu(part(x))
        return x


class IntegerOutputs(Odd):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kinds = x.argmax(1)
        for part in self.parts:
            x = torch.tanh(part(x))
        return x, kinds + x.argmax(1)


class InPlace(Odd):
    def forward(self, x: Tensor) -> Tensor:
        for number, part in enumerate(self.parts):
            y = part(x)
            kept = torch.tanh(y)
            y.mul_(0.5)
            y[:, 0] = number
            x = F.relu(y, inplace=True) + kept
            x.add_(1.0)
        return x


class Configured(Odd):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for part in self.parts:
            x = part(x) if self.config["plain"] else F.gelu(part(x))
            if mask is not None:
                x = x * mask
        return x


class ViewsHandedOn(Odd):
    def forward(self, x: Tensor) -> Any:
        y = self.parts[0](x)
        left, right = y.chunk(2, dim=1)
        turned = y.t()
        spread = y[:, :1].expand(-1, WIDTH)
        for part in self.parts[1:]:
            y = part(torch.relu(y)) + spread
        return y * turned.t() + torch.cat([right, left], 1)


class Counting(Odd):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(part(x))
        self.seen += x.size(0)
        return x * 2


class ChangesItsInput(Odd):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1.0)
        for part in self.parts:
            x = torch.tanh(part(x))
        return x


class AloneIsDifferent(Odd):
    def forward(self, x: Tensor) -> Tensor:
        if x.size(0) == 1:
            return self.parts[0](x) * 3  # type: ignore[no-any-return]
        for part in self.parts:
            x = torch.tanh(part(x))
        return x


def first(outputs: Any, target: Tensor) -> Tensor:
    """The mean square of everything that has a gradient."""
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return sum((F.mse_loss(x, target) for x in tensors if x.is_floating_point()), torch.zeros(()))


def rows(count: int = 6) -> Tensor:
    return torch.randn(count, WIDTH)


Inputs = Callable[[], Any]
CASES: list[tuple[Callable[[], nn.Module], Inputs]] = [
    (NestedDicts, lambda: ({"deep": {"x": rows()}, "pair": [torch.arange(6), rows()]},)),
    (SeveralInputsAndOutputs, lambda: {"a": rows(), "b": rows(), "scale": torch.tensor(0.5)}),
    (CalledTwice, rows),
    (SharedFarApart, rows),
    (Loop, rows),
    (UnusedParameter, rows),
    (IntegerOutputs, rows),
    (InPlace, rows),
    (lambda: Configured({"plain": False}), lambda: {"x": rows(), "mask": rows() > 0}),
    (ViewsHandedOn, rows),
    (Counting, rows),
]
NAMES = ["dicts", "several", "twice", "shared", "loop", "unused", "integers", "in-place", "config", "views", "counting"]


@pytest.mark.parametrize(("make", "inputs"), CASES, ids=NAMES)
def test_an_odd_model_has_the_bits_of_its_own_loop(make: Callable[[], nn.Module], inputs: Inputs) -> None:
    batches = [(inputs(), rows()) for _ in range(3)]
    once = make in (NestedDicts, SeveralInputsAndOutputs, Counting)  # evaluate traces again
    assert_exact(make(), batches, loss=first, devices=2, schedule="zb-v", evaluate=once)


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("make", [SharedFarApart, InPlace, ViewsHandedOn])
def test_the_oddest_run_exactly_with_remat(make: Callable[[], nn.Module]) -> None:
    assert_exact(make(), [(rows(), rows()) for _ in range(2)], loss=first, devices=3, remat="stage", evaluate=False)


def test_a_model_that_treats_one_sample_differently_is_traced_again_for_it() -> None:
    assert_exact(AloneIsDifferent(), [(rows(5), rows(5)), (rows(6), rows(6))], loss=first)  # 2 2 1, then 2 2 2


def test_a_model_that_changes_its_input_is_exact() -> None:
    assert_exact(ChangesItsInput(), [(rows(), rows())], loss=first)


class ChangesItsInputLate(Odd):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        for part in self.parts:
            y = torch.tanh(part(y))
        return x.add_(y)


def test_where_no_cut_would_be_right_the_model_is_refused() -> None:
    with (
        gapless.Pipeline(ChangesItsInputLate(), devices=2, microbatches=2, loss=first) as pipe,
        pytest.raises(PartitionError, match=r"can be cut in 0 places.*layers="),
    ):
        pipe.step(rows(), rows())


class LooksAtData(Odd):
    def forward(self, x: Tensor) -> Tensor:
        x = self.parts[0](x)
        if x.sum() > 0:
            x = -x
        for part in self.parts[1:]:
            x = part(x)
        return x


def test_what_can_not_be_traced_is_refused_with_the_line_and_the_way_out() -> None:
    model = LooksAtData()
    with (
        gapless.Pipeline(model, devices=2, microbatches=2, loss=F.mse_loss) as pipe,
        pytest.raises(
            PartitionError, match=r"can't trace LooksAtData.*test_odd_models.py, line \d+.*layers=\["
        ) as info,
    ):
        pipe.step(rows(), rows())
    line = int(str(info.value).split("line ")[1].split(",")[0])
    assert "if x.sum() > 0" in Path(__file__).read_text().splitlines()[line - 1]


class SpeaksAndLooksAtData(LooksAtData):
    def forward(self, x: Tensor) -> Tensor:
        print("here", file=sys.stderr)
        return super().forward(x)


def test_of_a_trace_that_fails_torch_logs_and_prints_nothing_beside_the_refusal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It would be 60 lines, with a graph for each attempt."""
    logged: list[str] = []
    ear, logger = logging.Handler(), logging.getLogger("torch.fx.experimental.symbolic_shapes")
    ear.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(ear)
    try:
        with pytest.raises(PartitionError, match="can't trace SpeaksAndLooksAtData"):
            gapless.Pipeline(SpeaksAndLooksAtData(), devices=2, microbatches=2, loss=F.mse_loss, example=rows())
    finally:
        logger.removeHandler(ear)
    assert logged == []
    assert capsys.readouterr() == ("", "here\n" * 3)  # what a model says itself stays, of all three attempts
    assert logger.getEffectiveLevel() == logging.WARNING


def test_layers_by_hand_are_the_way_out() -> None:
    model = LooksAtData()

    def turned(x: Tensor) -> Tensor:
        return -x if x.sum() > 0 else x

    layers = [model.parts[0], turned, *model.parts[1:]]
    assert_exact(model, [(rows(), rows()) for _ in range(2)], loss=F.mse_loss, layers=layers)


def test_layers_by_hand_must_be_the_models_own() -> None:
    with pytest.raises(PartitionError, match="layer 0 has the parameter weight, which the model does not have"):
        gapless.Pipeline(LooksAtData(), layers=[nn.Linear(2, 2)] * 2, devices=2, microbatches=2, loss=F.mse_loss)
