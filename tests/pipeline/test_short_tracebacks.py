"""What a user sees of an error in a step."""

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless

PACKAGE = str(Path(gapless.__file__).parent)


class Faulty(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return of_the_user(x)


def of_the_user(x: Tensor) -> Tensor:
    raise ValueError(f"not {tuple(x.shape)}")


def files(pipe: gapless.Pipeline, **options: Any) -> list[str]:
    with pytest.raises(Exception, match=r"not \(1, 4\)|sync is") as caught:
        pipe.step(torch.randn(8, 4), torch.randn(8, 4), **options)
    return [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_a_step_shows_the_frames_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    with gapless.Pipeline([nn.Linear(4, 4), Faulty()], devices=2, microbatches=8, loss=F.mse_loss) as pipe:
        for options in ({}, {"sync": "no"}):
            shown = files(pipe, **options)
            assert sum(name.startswith(PACKAGE) for name in shown) <= 1  # step itself
            assert shown[-1] == __file__ or options
        monkeypatch.setenv("GAPLESS_TRACEBACK", "full")
        assert sum(name.startswith(PACKAGE) for name in files(pipe)) > 5
