"""A loss that uses the weights of a stage in another process."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.errors import ConfigError, TransportError
from tests.run.forked import Launch
from tests.run.ranks.test_many_processes import line


def stacked(terms: Any) -> Tensor:
    return torch.stack(list(terms)).sum()


def penalised() -> None:
    mesh = line()
    for message, total in (
        (r"stage 1 uses the parameter 0\.\w+, which belongs to stage 0", sum),
        ("the loss of stage 1 uses the weights of a stage in another process", stacked),
    ):
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        weights = list(model.parameters())

        def loss(out: Tensor, target: Tensor, weights: Any = weights, total: Any = total) -> Tensor:
            penalty: Tensor = total(weight.square().sum() for weight in weights)
            return F.mse_loss(out, target) + 0.01 * penalty

        with (
            gapless.Pipeline(model, mesh=mesh, microbatches=2, loss=loss) as pipe,
            pytest.raises((ConfigError, TransportError), match=message),
        ):
            pipe.step(torch.randn(4, 6), torch.randn(4, 6))


def test_a_penalty_on_weights_of_another_rank_is_refused_by_their_name(launch: Launch) -> None:
    """Their values are not here: what stands in their place is empty, or as old as the first step."""
    launch(penalised, 2)
