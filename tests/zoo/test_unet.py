"""The U-Net of the zoo keeps the size of its images."""

from __future__ import annotations

import pytest
import torch

from gapless.zoo.unet import unet


@pytest.mark.parametrize(("depth", "width"), [(1, 4), (3, 2)])
def test_a_map_is_as_large_as_its_image(depth: int, width: int) -> None:
    model = unet(depth=depth, width=width, channels=2, classes=5)
    assert model(torch.randn(2, 2, 16, 24)).shape == (2, 5, 16, 24)
