"""What CUDA graphs rely on, as far as it can be seen without a GPU: what has changed is noticed, and what has not."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gapless import Pipeline
from gapless.errors import ConfigError
from gapless.stage.graphs.graph_assumptions import Unchanged, why_not
from gapless.stage.graphs.graph_memory import FixedTree


class Held:
    """A layer, a loss and an object of the user's, with all that may change in them."""

    def __init__(self) -> None:
        self.linear, self.dropout = nn.Linear(3, 3), nn.Dropout(0.1)
        self.module = nn.Sequential(self.linear, self.dropout)
        self.table = {"cos": torch.ones(2)}
        self.module.cache = self.table  # type: ignore[assignment]
        self.module.config = type("Config", (), {})()
        self.module.config.attention = "sdpa"  # type: ignore[union-attr]
        self.weights = [torch.ones(3), torch.ones(3)]
        self.loss = functools.partial(self._loss_of(self.weights), smoothing=0.1)

    def _loss_of(self, weights: list[Tensor]) -> Callable[..., Tensor]:
        return lambda outputs, target, smoothing: (outputs * weights[0] * smoothing).sum()


CHANGES: dict[str, Callable[[Held], Any]] = {
    "a weight is elsewhere": lambda held: setattr(held.linear.weight, "data", held.linear.weight.data.clone()),
    "a weight is frozen": lambda held: held.linear.weight.requires_grad_(False),
    "a number": lambda held: setattr(held.dropout, "p", 0.5),
    "train mode": lambda held: held.dropout.eval(),
    "a tensor in a dict": lambda held: held.table.update(cos=torch.ones(2)),
    "a number of an object's": lambda held: setattr(held.module.config, "attention", "eager"),
    "a tensor of a closure's list": lambda held: held.weights.reverse(),
    "numbers on the CPU": lambda held: held.table["cos"].fill_(2.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed(change: Callable[[Held], Any]) -> None:
    held = Held()
    before = Unchanged([held.module, held.loss])
    assert before == Unchanged([held.module, held.loss])
    change(held)
    assert before != Unchanged([held.module, held.loss])


def test_a_forward_and_its_backward_change_nothing() -> None:
    held = Held()
    before = Unchanged([held.module, held.loss])
    held.loss(held.module(torch.ones(2, 3)), None).backward()
    assert before == Unchanged([held.module, held.loss])


def test_a_setting_that_chooses_kernels_is_noticed() -> None:
    before, was = Unchanged([]), torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = not was
    try:
        assert before != Unchanged([])
    finally:
        torch.backends.cudnn.benchmark = was


def test_what_a_graph_would_leave_out_has_a_reason() -> None:
    hooked, sparse = nn.Linear(3, 3), nn.Identity()
    hooked.register_forward_hook(lambda *_: None)
    sparse.table = torch.eye(3).to_sparse()
    learnt = nn.Parameter(torch.ones(3))
    learnt.register_hook(lambda grad: grad)
    assert why_not([hooked], []) == "its Linear has hooks, or a forward of its own"
    assert why_not([nn.BatchNorm1d(3)], []) == "its BatchNorm1d counts what it sees"
    assert why_not([nn.BatchNorm1d(3).eval(), F.mse_loss], []) is None
    assert "sparse" in str(why_not([sparse], []))
    assert why_not([], [learnt]) == "a parameter has hooks"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 1).expand(3, 4),
        torch.randn(()).expand(2, 3),
        torch.randn(4, 3).t(),
        torch.randn(2, 1, 3),
        torch.randn(()),
        torch.randn(0, 3),
        torch.arange(6).view(2, 3),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.stride()}",
)
def test_a_place_is_laid_out_as_what_comes_there(tensor: Tensor) -> None:
    place = FixedTree((tensor, 3))
    made = place.tree[0]
    assert (made.shape, made.stride(), made.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert torch.equal(made, tensor)
    next_one = torch.arange(20).to(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    place.take((next_one, 3))
    assert torch.equal(made, next_one)
    assert place.tree[0] is made


@pytest.mark.parametrize("graphs", ["yes", 1, None])
def test_another_value_is_refused(graphs: Any) -> None:
    with pytest.raises(ConfigError, match=rf"graphs is {graphs!r}, but it must be False, True or 'auto'"):
        Pipeline(nn.Sequential(nn.Linear(2, 2)), devices=1, microbatches=1, loss=F.mse_loss, graphs=graphs)


def test_graphs_need_a_gpu() -> None:
    with pytest.raises(ConfigError, match="every device is a CPU: leave it out, or give graphs='auto'"):
        Pipeline(nn.Sequential(nn.Linear(2, 2)), devices=1, microbatches=1, loss=F.mse_loss, graphs=True)
