"""The ResNets of the zoo are the published ones."""

from __future__ import annotations

import pytest
import torch

from gapless.zoo.resnet import resnet


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
