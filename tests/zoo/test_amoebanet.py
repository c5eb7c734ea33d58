"""AmoebaNet has the published numbers of parameters."""

from typing import Any

import pytest
import torch

from gapless.zoo.amoebanet import amoebanet


@pytest.mark.parametrize(("filters", "millions"), [(208, 82), (416, 318)])
def test_its_parameters_are_as_many_as_published(filters: int, millions: int) -> None:
    with torch.device("meta"):
        model = amoebanet(cells=18, filters=filters)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert abs(count / (millions * 1e6) - 1) < 0.01


@pytest.mark.parametrize("size", [32, 37])
def test_any_size_of_image_goes_through(size: int) -> None:
    model = amoebanet(cells=3, filters=8, classes=5)
    assert model(torch.randn(2, 3, size, size)).shape == (2, 5)


@pytest.mark.parametrize(("options", "way_out"), [({"cells": 10}, "3"), ({"filters": 6}, "4")])
def test_sizes_that_it_can_not_have_are_refused(options: dict[str, Any], way_out: str) -> None:
    with pytest.raises(ValueError, match=f"choose .*{way_out}"):
        amoebanet(**options)
