"""Models of many equal blocks: few of them are looked at and stand for all."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.errors import ConfigError
from gapless.plan.profile.blocks import measure_blocks
from gapless.plan.profile.measure import measure
from gapless.plan.profile.profile import Profile
from tests.model.training import assert_exact


class Blocks(nn.Module):
    """Linear layers of these widths inside, with residuals."""

    def __init__(self, *widths: int, scales: tuple[float, ...] = ()) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, n), nn.Tanh(), nn.Linear(n, 4)) for n in widths)
        for block, scale in zip(self.blocks, scales, strict=False):
            block.scale = scale  # type: ignore[assignment]

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = x + block(x)
        return {"loss": F.mse_loss(x, labels)}


def parameters_of(model: nn.Module) -> int:
    return sum(each.nbytes for each in model.parameters())


def flops_of(profile: Profile, *names: str) -> int:
    return round(1e12 * float(sum(getattr(layer, name).median for layer in profile.layers for name in names)))


def vectors() -> dict[str, Tensor]:
    return {"x": torch.randn(3, 4), "labels": torch.randn(3, 4)}


def test_sizes_of_a_traced_model_without_data_are_those_that_are_measured() -> None:
    model, inputs = Blocks(6, 6), vectors()
    real = measure(model, inputs, seconds=0.01)
    fake = measure(model.to("meta"), inputs, sizes_alone=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    for name in ("parameters", "gradients", "optimizer_state", "activation", "boundary", "overlap"):
        assert [getattr(each, name) for each in fake.layers] == [getattr(each, name) for each in real.layers]
    assert all(layer.forward.median == 0 for layer in fake.layers)


@pytest.mark.parametrize(
    "widths",
    [
        *((7, *(5, 6) * 5, 5), (3, 5, 7)),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ((6,) * 7, (5, *[6] * 7), (5, 6) * 6, (5, 6) * 6 + (5,), (6,) * 9)
        ),
    ],
)
def test_blocks_in_turns_and_others_in_front_are_told_as_they_are(widths: tuple[int, ...]) -> None:
    profile = measure_blocks(Blocks(*widths), vectors(), flops=1e12)
    assert sum(layer.parameters for layer in profile.layers) == parameters_of(Blocks(*widths))
    assert flops_of(profile, "forward") == sum(2 * 2 * 3 * 4 * width for width in widths)
    if len(widths) > 6:  # else nothing was left out
        blocks = [layer for layer in profile.layers if ".blocks." in layer.name]
        assert [layer.name.rpartition(".")[2] for layer in blocks] == [str(number) for number in range(len(widths))]
        assert [layer.parameters for layer in blocks] == [4 * (9 * width + 4) for width in widths]


def test_a_block_with_another_number_in_it_is_looked_at_itself() -> None:
    """It may do something else with it."""
    same, other = (
        measure_blocks(Blocks(*[6] * 5, scales=(1.0,) * 4 + (last,)), vectors(), flops=1e12) for last in (1.0, 2.0)
    )
    assert len([layer for layer in same.layers if ".blocks." in layer.name]) == 5
    assert other.layers != same.layers
    assert flops_of(other, "forward") == flops_of(same, "forward")


def test_a_plan_without_running_anything_is_run_as_planned() -> None:
    with torch.device("meta"):
        empty = Blocks(*[6] * 5)
    batch = {"x": torch.randn(8, 4), "labels": torch.randn(8, 4)}
    plan = gapless.make_plan(empty, batch, devices=["cpu"] * 2, schedules=["1f1b"], microbatches=4, flops=1e12)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert "nothing was run" in plan.caution
    torch.manual_seed(0)
    assert_exact(Blocks(*[6] * 5), [(batch, None)], schedule=plan, microbatches=4)


def test_a_speed_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"flops is -1\.0, but it must be a number above 0"):
        measure(Blocks(6, 6), vectors(), flops=-1.0)
