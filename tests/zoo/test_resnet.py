"""The ResNets of the zoo are the published ones, learn, and give the same bits in stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gapless.zoo.resnet import resnet
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
    make=lambda: resnet(18, classes=5, width=4),
    batch=lambda: (torch.randn(9, 3, 16, 16), torch.randint(5, (9,))),
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


@pytest.mark.parametrize(("schedule", "devices", "remat"), CASES)
def test_in_stages_it_gives_the_bits_of_the_plain_loop(
    schedule: str, devices: int, remat: Any, plain: list[Step]
) -> None:
    assert_same_steps(in_stages(SUBJECT, devices=devices, schedule=schedule, remat=remat), plain)


def test_each_layer_can_be_recomputed_by_itself(plain: list[Step]) -> None:
    assert_same_steps(in_stages(SUBJECT, devices=2, schedule="zb-v", remat="layer"), plain)


def test_bottlenecks_give_the_bits_of_the_plain_loop_too() -> None:
    subject = Subject(lambda: resnet(50, classes=5, width=2), SUBJECT.batch, SUBJECT.loss, SUBJECT.options)
    assert_same_steps(in_stages(subject, devices=3, schedule="zb-h1", remat="stage"), plainly(subject))


@pytest.mark.parametrize(
    ("depth", "parameters"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032), (101, 44_549_160)]
)
def test_it_has_the_published_number_of_parameters(depth: int, parameters: int) -> None:
    with torch.device("meta"):
        model = resnet(depth)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_an_unknown_depth_is_refused() -> None:
    with pytest.raises(ValueError, match="a ResNet of depth 20 is not known: choose one of 18, 34, 50, 101"):
        resnet(20)


def test_it_learns_a_batch_by_heart() -> None:
    torch.manual_seed(0)
    model = resnet(18, classes=3, width=4)
    x, y = torch.randn(8, 3, 32, 32), torch.randint(3, (8,))
    assert_learns_by_heart(model, (x,), y, F.cross_entropy)
