"""Auxiliary losses between ranks: those that layers add, and those that a loss tries to read from another rank."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gapless
from gapless.errors import GaplessError, TransportError
from tests.run.forked import Launch
from tests.run.ranks.test_many_processes import line
from tests.stage.guards.test_stored_tensors import Keeps
from tests.stage.guards.test_stored_tensors import sequence as storing
from tests.test_aux_loss import WIDTH, plain_loop, sequence


def added() -> None:
    mesh = line()
    for schedule in ("1f1b", "zb-h1"):
        model = sequence()
        plain = copy.deepcopy(model)
        torch.manual_seed(1)
        x, y = torch.randn(10, WIDTH), torch.randn(10, WIDTH)
        with gapless.Pipeline(model, mesh=mesh, microbatches=4, loss=F.mse_loss, schedule=schedule) as pipe:
            losses = pipe.step(x, y).losses
            for ours, other in zip(losses, plain_loop(plain, x, y), strict=True):
                assert torch.equal(ours, other), schedule
            names = dict(plain.named_parameters())
            for name, parameter in pipe.named_parameters():
                assert torch.equal(parameter.grad, names[name].grad), f"{schedule}, {name}"  # type: ignore[arg-type]


def read() -> None:
    mesh = line()
    model = storing("detached")

    def loss(outputs: Tensor, target: Tensor) -> Any:
        kept: Any = sum(part.aux for part in model.modules() if isinstance(part, Keeps))
        return F.mse_loss(outputs, target) + kept

    with (
        gapless.Pipeline(model, mesh=mesh, microbatches=4, loss=loss) as pipe,
        pytest.raises((GaplessError, TransportError), match=r"0.aux is set by a layer that another rank runs"),
    ):
        pipe.step(torch.randn(8, WIDTH), torch.randn(8, WIDTH))


def test_auxiliary_losses_of_any_rank_have_the_bits_of_the_plain_loop(launch: Launch) -> None:
    launch(added, 2)


def test_a_loss_that_reads_what_another_rank_has_stored_is_refused(launch: Launch) -> None:
    """On its own rank it found the zero from the constructor, and trained without the rest."""
    launch(read, 2)
