"""A trace answers what a model asks of its batch, and makes the choices of a plain call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.errors import PartitionError
from tests.model.training import assert_exact


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)


class Asking(Net):
    """Skips what a mask without zeros does not need, as attention does: other operations, other bits."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.first(x)
        if mask.sum() != mask.numel():
            x = (x * 1.1) * mask[:, None]
        return torch.tanh(self.second(x))


def masked(samples: int, *empty: int) -> dict[str, Tensor]:
    mask = torch.ones(samples, dtype=torch.long)
    mask[list(empty)] = 0
    return {"x": torch.randn(samples, 4), "mask": mask}


def test_every_microbatch_takes_the_branch_that_its_own_data_choose() -> None:
    model = Asking()
    batches = [(masked(6, 3), torch.randn(6, 4)), (masked(6), torch.randn(6, 4)), (masked(9, 0, 8), torch.randn(9, 4))]
    assert_exact(model, batches, loss=F.mse_loss, schedule="zb-v", remat="stage")


def is_padded(mask: Tensor) -> bool:
    """As Wav2Vec2 makes the mask of its features: written where the last one is, and summed up from there."""
    made = torch.zeros_like(mask)
    made[torch.arange(len(mask), device=mask.device), mask.sum(-1) - 1] = 1
    part = made[:, 1:]
    part.mul_(2)
    made = made.flip([-1]).cumsum(-1).flip([-1])
    return not made.all()


class AskingIn(Net):
    def __init__(self, ask: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.first(x)
        if self.ask(mask):
            x = (x * 1.1) * mask
        return torch.tanh(self.second(x))


@pytest.mark.parametrize(
    "ask",
    [lambda mask: 0 in mask, lambda mask: (mask == 0).any().item(), is_padded],
    ids=["a number in a tensor", "item", "of a tensor that is written"],
)
def test_a_question_may_be_asked_in_any_way(ask: Callable[[Tensor], bool]) -> None:
    """GPT-2 without a mask looks for padding in its tokens; each of these was refused."""
    mask = torch.ones(6, 4, dtype=torch.long)
    mask[3, 2:] = 0
    assert_exact(AskingIn(ask), [({"x": torch.randn(6, 4), "mask": mask}, torch.randn(6, 4))], loss=F.mse_loss)


def test_there_are_as_many_traces_as_answers() -> None:
    with gapless.Pipeline(Asking(), devices=2, microbatches=3, loss=F.mse_loss) as pipe:
        for empty in ((), (1,), (2, 5), (0,)):
            pipe.step(masked(6, *empty), torch.randn(6, 4))
        assert pipe._staged.model.num_traces == 2  # type: ignore[union-attr]


class OfWeights(Net):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x if x.sum() > 0 else -x)  # type: ignore[no-any-return]


class OfChanged(Net):
    """What is asked was written into the batch before."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask[:2] = 0
        return self.second(self.first(x) if mask.all() else x)  # type: ignore[no-any-return]


class OfDraws(Net):
    def __init__(self, dropped: float) -> None:
        super().__init__()
        self.dropped = dropped

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            if torch.rand([]) < self.dropped:
                continue
            x = layer(x)
        return x


@pytest.mark.parametrize("model", [OfWeights(), OfChanged(), OfDraws(0.5)], ids=lambda model: type(model).__name__)
def test_what_the_batch_does_not_decide_is_refused_with_its_line(model: nn.Module) -> None:
    with (
        gapless.Pipeline(model, devices=2, microbatches=2, loss=F.mse_loss) as pipe,
        pytest.raises(PartitionError, match=r"test_batch_questions.py, line \d+, in forward"),
    ):
        pipe.step(masked(4), torch.randn(4, 4))


def test_a_layer_that_is_never_dropped_needs_no_draw_to_be_known() -> None:
    """OPT and Whisper draw a number for every layer and compare it with 0."""
    assert_exact(OfDraws(0.0), [(masked(6), torch.randn(6, 4))], loss=F.mse_loss)


class Looking(Net):
    """Computes otherwise if it is compiled or exported."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if torch.compiler.is_compiling() or torch.compiler.is_exporting():
            x = x * 3
        return self.second(x)  # type: ignore[no-any-return]


def test_a_model_that_looks_whether_it_is_traced_is_told_no() -> None:
    looks: Any = (torch.compiler.is_compiling, torch.compiler.is_exporting)
    assert_exact(Looking(), [(torch.randn(6, 4), torch.randn(6, 4))], loss=F.mse_loss)
    assert looks == (torch.compiler.is_compiling, torch.compiler.is_exporting)
