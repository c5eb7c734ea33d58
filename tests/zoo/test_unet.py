"""The U-Net of the zoo keeps the size of its images, learns, and gives the same bits in stages, by trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gapless.zoo.unet import unet
from tests.zoo.training import (
    CASES,
    STEPS,
    Step,
    Subject,
    assert_learns_by_heart,
    assert_same_steps,
    in_stages,
    plainly,
)

SUBJECT = Subject(
    make=lambda: unet(depth=2, width=4, channels=1, classes=3),
    batch=lambda: (torch.randn(8, 1, 8, 8), torch.randint(3, (8, 8, 8))),
    loss=F.cross_entropy,
    options=(("batchnorm", "deferred"),),
)


@pytest.fixture(scope="module")
def plain() -> list[Step]:
    return plainly(SUBJECT)


def test_a_minibatch_counts_once_for_every_batch_norm(plain: list[Step]) -> None:
    counters = [buffer for buffer in plain[-1].buffers if buffer.dtype == torch.int64]
    assert counters
    assert all(int(counter) == STEPS for counter in counters)


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize(("schedule", "devices", "remat"), CASES)
def test_in_stages_it_gives_the_bits_of_the_plain_loop(
    schedule: str, devices: int, remat: Any, plain: list[Step]
) -> None:
    assert_same_steps(in_stages(SUBJECT, devices=devices, schedule=schedule, remat=remat), plain)


@pytest.mark.parametrize(("depth", "width"), [(1, 4), (3, 2)])
def test_a_map_is_as_large_as_its_image(depth: int, width: int) -> None:
    model = unet(depth=depth, width=width, channels=2, classes=5)
    assert model(torch.randn(2, 2, 16, 24)).shape == (2, 5, 16, 24)


def test_it_learns_a_batch_by_heart() -> None:
    torch.manual_seed(0)
    model = unet(depth=2, width=8, channels=1)
    x = torch.randn(4, 1, 8, 8)
    y = (x[:, 0] > 0).long()
    assert_learns_by_heart(model, (x,), y, F.cross_entropy)
