"""Where a traced graph is cut into layers for a plan: evenly, where little crosses, and only where it may be."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gapless.model.traced.capture import flat_of
from gapless.model.traced.crossing import Crossing, choose, even_cuts, homes_of
from gapless.model.traced.trace import Trace


class Bottles(nn.Module):
    """Wide inside of each part, narrow between them, and a change in place that no cut may part."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(4, 32) for _ in range(depth))
        self.narrow = nn.ModuleList(nn.Linear(32, 4) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for wide, narrow in zip(self.wide, self.narrow, strict=True):
            x = narrow(torch.tanh(wide(x)).mul_(2.0).add_(1.0))
        return x


@pytest.fixture(scope="module")
def crossing() -> Crossing:
    return Crossing(Trace(Bottles(), *flat_of(torch.randn(3, 4))))


@pytest.mark.parametrize("most", [2, 3, 6, 12, 48])
def test_layers_are_no_more_than_asked_for_and_cut_where_it_is_allowed(crossing: Crossing, most: int) -> None:
    places = even_cuts(crossing, most)
    assert 1 <= len(places) < most
    assert places == sorted(set(places))
    assert all(crossing.allowed[place] for place in places)


def test_with_room_to_choose_cuts_are_where_least_crosses(crossing: Crossing) -> None:
    least = min(crossing.bytes)
    assert [crossing.bytes[place] for place in even_cuts(crossing, 6)] == [least] * 5


def test_no_layer_costs_much_more_than_its_share_or_than_what_can_not_be_cut(crossing: Crossing) -> None:
    sums = [0.0, *accumulate(crossing.costs)]
    allowed = [place + 1 for place, free in enumerate(crossing.allowed[:-1]) if free]
    largest = max(sums[b] - sums[a] for a, b in pairwise([0, *allowed, len(crossing.costs)]))
    bounds = [0, *(place + 1 for place in even_cuts(crossing, 12)), len(crossing.costs)]
    assert max(sums[b] - sums[a] for a, b in pairwise(bounds)) <= 2 * sums[-1] / 11 + largest


def test_every_parameter_has_the_stage_that_uses_it(crossing: Crossing) -> None:
    homes = homes_of(crossing, even_cuts(crossing, 6)[2:4])
    assert [homes[f"wide.{number}.weight"] for number in range(6)] == [{0}, {0}, {0}, {1}, {2}, {2}]
    assert homes["narrow.2.bias"] == {0}


class Turned(nn.Module):
    """Whether `contiguous` copies what attention gives is up to the kernel, and another may run than is traced."""

    def forward(self, x: Tensor) -> Tensor:
        attended = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        turned = attended.transpose(1, 2).contiguous()
        return turned.mul_(2.0).transpose(1, 2) + attended


def test_there_is_no_cut_between_a_value_and_a_change_of_what_may_be_its_view() -> None:
    crossing = Crossing(Trace(Turned(), *flat_of(torch.randn(4, 2, 6, 8))))
    names = [node.name for node in crossing.trace.nodes]
    between = range(names.index("scaled_dot_product_attention"), names.index("mul_"))
    assert not any(crossing.allowed[place] for place in between)


class Headed(nn.Module):
    """Small blocks, and a head that has as many multiplications as all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(15))
        self.head = nn.Linear(64, 64 * 1024)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize(("rows", "eager", "blocks"), [(256, False, 15), (256, True, 8), (2**16, True, 15)])
def test_on_a_gpu_the_cut_is_by_launches_only_where_these_take_the_time(rows: int, eager: bool, blocks: int) -> None:
    trace = Trace(Headed(), *flat_of(torch.empty(rows, 64)))
    with FakeTensorMode():  # as if it were on one
        for node in trace.nodes[0].graph.nodes:
            if isinstance(node.meta.get("val"), Tensor):
                node.meta["val"] = torch.empty(node.meta["val"].shape, device="cuda")
    (place,) = choose(Crossing(trace, eager=eager), 2)
    homes = homes_of(Crossing(trace), [place])
    assert [homes[f"blocks.{number}.weight"] for number in range(15)].count({0}) == blocks
