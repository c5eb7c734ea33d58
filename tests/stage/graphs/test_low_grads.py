"""Gradients that are left in low precision, and cast and added all at once, have the bits of a plain loop's."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gapless.stage.graphs.graph_memory import add_grads, grads_aside
from gapless.stage.graphs.low_grads import LowGrads
from gapless.stage.split.deferred import Records


class Net(nn.Module):
    """Layers in a random order, some of them twice; some weights are also used as they are."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        linears = [nn.Linear(8, 8, bias=draw.random() < 0.5) for _ in range(4)]
        self.layers: list[nn.Linear] = linears
        self.kept = nn.ModuleList(linears)
        self.order = [draw.randrange(4) for _ in range(draw.randint(1, 6))]
        self.plain = {number for number in self.order if draw.random() < 0.3}

    def forward(self, x: Tensor) -> Any:
        for number in self.order:
            x = torch.tanh(self.layers[number](x))
        return x.float().sum() + sum(self.layers[number].weight.sum() for number in sorted(self.plain))


@pytest.mark.parametrize("seed", range(12))
def test_grads_that_are_cast_at_once_are_those_of_a_plain_loop(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    net, low_ones = Net(draw), 0
    batches = torch.randn(3, 5, 8)
    for x in batches:
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(x)
        loss.backward()
    expected = {name: each.grad for name, each in net.named_parameters()}
    net.zero_grad()
    parameters = list(net.parameters())
    for x in batches:
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(x)
        low = LowGrads([get_gradient_edge(loss)], Records())
        with grads_aside(parameters, low) as added:
            low.joined(loss.backward())
        low_ones += len(low)
        add_grads(added)
    assert low_ones == 3 * len({*net.order} - net.plain) + 3 * sum(
        net.layers[number].bias is not None for number in {*net.order}
    )
    for name, each in net.named_parameters():
        assert (each.grad is None) == (expected[name] is None), name
        assert each.grad is None or torch.equal(each.grad, expected[name]), name  # type: ignore[arg-type]


def test_what_has_waited_is_left_low_too() -> None:
    weight, both = (nn.Parameter(torch.ones(2)) for _ in range(2))
    records, grad = Records(), torch.full((2,), 0.1, dtype=torch.bfloat16)
    low = LowGrads([], records)
    with grads_aside([weight, both], low) as added:
        both.grad = torch.full((2,), 0.25)  # what autograd has added
        for parameter in (weight, both):
            records.append((parameter, lambda kept, _: kept, grad, None, True))
        records.accumulate()
        low.joined(None)
    assert [(each.dtype, each.tolist()) for _, each in added] == [
        (torch.bfloat16, grad.tolist()),
        (torch.float32, (0.25 + grad.float()).tolist()),
    ]
