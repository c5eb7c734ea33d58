"""A model that every rank edits between two steps: the bits of the plain loop with the same edits."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gapless
from gapless.errors import ConfigError, PartitionError
from tests.by_hand import loop, same
from tests.model.traced.test_trace_cache import EDITS, Net, _layers
from tests.run.forked import Launch
from tests.run.ranks.test_many_processes import line

KEPT = ("replace", "append", "freeze", "hook", "parametrize", "new_parameter", "eps", "other_class", "delete")


def followed(kind: str) -> None:
    """Each edit by itself: the steps before and after it."""
    mesh = line()
    for edit in KEPT:
        if kind == "traced" and edit not in ("freeze", "hook"):
            continue
        torch.manual_seed(1)
        model: nn.Module = Net(*_layers()) if kind == "traced" else nn.Sequential(*_layers())
        plain = copy.deepcopy(model)
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        with gapless.Pipeline(model, mesh=mesh, microbatches=4, loss=F.mse_loss, schedule="zb-h1") as pipe:
            for number in range(3):
                if number == 1:
                    EDITS[edit](model)
                    EDITS[edit](plain)
                ours = torch.optim.SGD(pipe.parameters(), lr=0.1)
                assert same(pipe.step(x, y).loss, loop(plain, x, y)), f"{edit}, step {number}"
                names = dict(plain.named_parameters())
                held = dict(pipe.named_parameters())
                assert 0 < len(held) < len(names)
                for name, parameter in held.items():
                    grad, expected = parameter.grad, names[name].grad
                    assert (grad is None) == (expected is None), f"{edit}, step {number}, {name}"
                    assert expected is None or same(grad, expected), f"{edit}, step {number}, {name}"
                ours.step()
                torch.optim.SGD(plain.parameters(), lr=0.1).step()
            state = pipe.state_dict()
            assert list(state) == list(plain.state_dict())
            for name, value in plain.state_dict().items():
                assert torch.equal(state[name], value), f"{edit}, {name}"


def refused() -> None:
    """A rank has not trained what others held, and its optimizer does not know it; without the edit it goes on."""
    mesh = line()
    torch.manual_seed(1)
    model = nn.Sequential(*_layers())
    plain = copy.deepcopy(model)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with gapless.Pipeline(model, mesh=mesh, microbatches=4, loss=F.mse_loss) as pipe:
        assert same(pipe.step(x, y).loss, loop(plain, x, y))
        last: Any = model[5]
        weight = last.weight
        last.weight = model[0].weight
        with pytest.raises(PartitionError, match=r"device 1 uses 0\.weight, which only device 0 has trained"):
            pipe.step(x, y)
        last.weight = weight
        assert same(pipe.step(x, y).loss, loop(plain, x, y))
        model[0], model[5] = model[5], model[0]
        with pytest.raises(PartitionError, match="in another order"):
            pipe.step(x, y)


def replicas() -> None:
    """Replicas add up the gradients of a parameter that learns later, and start new layers with the same values."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = nn.Sequential(*_layers())
    frozen: Any = model[2]
    frozen.requires_grad_(False)
    plain = copy.deepcopy(model)
    x, y = torch.randn(16, 4), torch.randn(16, 4)
    mine = slice(8 * rank, 8 * rank + 8)
    with gapless.Pipeline(model, mesh=mesh, microbatches=4, loss=F.mse_loss) as pipe:
        pipe.step(x[mine], y[mine], sync=False)
        loop(plain, x, y, 8)
        for each in (model, plain):
            for number, learns in ((2, True), (4, False)):  # what 4 has already is exchanged all the same
                layer: Any = each[number]
                layer.requires_grad_(learns)
        pipe.step(x[mine], y[mine])
        loop(plain, x, y, 8)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            torch.testing.assert_close(ours.grad, theirs.grad)  # sums over replicas have other last bits
        torch.manual_seed(rank)
        model[3] = nn.Linear(4, 4)
        pipe.step(x[mine], y[mine])
        weights = [torch.empty(4, 4) for _ in range(2)]
        new: Any = model[3]
        dist.all_gather(weights, new.weight.detach())
        grads = [torch.empty(4, 4) for _ in range(2)]
        for number in (2, 3, 4):
            dist.all_gather(grads, model[number].weight.grad)
            assert torch.equal(*grads), f"layer {number}"
        assert torch.equal(*weights)


def unlike() -> None:
    """Ranks that make different layers of their models are told, before they train them."""
    mesh = line()
    model = nn.Sequential(*_layers())
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with gapless.Pipeline(model, mesh=mesh, microbatches=4, loss=F.mse_loss) as pipe:
        pipe.step(x, y)
        model[4] = nn.Linear(4, 4, bias=dist.get_rank() == 0)
        with pytest.raises(ConfigError, match=r"model 4\.bias is"):
            pipe.step(x, y)


@pytest.mark.parametrize("kind", ["sequence", "traced"])
def test_edits_are_followed_between_ranks(kind: str, launch: Launch) -> None:
    launch(followed, 2, kind)


def test_an_edit_that_brings_parameters_to_another_rank_is_refused(launch: Launch) -> None:
    launch(refused, 2)


def test_replicas_follow_edits(launch: Launch) -> None:
    launch(replicas, 2)


def test_ranks_that_edit_differently_are_refused(launch: Launch) -> None:
    launch(unlike, 2)
