"""The tables of GPipe and of zero bubble: what is counted without data is what the models have."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.gpipe import bubbles, largest
from benchmarks.gpipe.bubbles import RATES, published_costs
from benchmarks.gpipe.giants import amoebanet_profile, counted, transformer_profile
from gapless.plan.profile.profile import Layer
from gapless.zoo import amoebanet as zoo


def test_counted_layers_have_the_published_numbers_of_parameters() -> None:
    for layers, published in ((3, 282.2e6), (13, 785.8e6), (103, 5.3e9)):
        counted = sum(layer.gradients for layer in transformer_profile(layers, 1, tokens=64).layers) / 4
        assert counted == pytest.approx(published, rel=0.01)


@pytest.mark.slow
def test_repeated_cells_are_those_of_the_deeper_model() -> None:
    with torch.device("meta"):
        layers = list(zoo.amoebanet(cells=12, filters=8))
        images, target = torch.empty(1, 3, 64, 64), torch.zeros(1, dtype=torch.long)
    whole = counted("", layers, images, target, F.cross_entropy)
    repeated = amoebanet_profile(12, 8, 1, side=64)
    assert [_of(layer) for layer in repeated.layers] == [_of(layer) for layer in whole.layers]


def _of(layer: Layer) -> tuple[float, ...]:
    return layer.parameters, layer.activation, layer.boundary, layer.workspace, layer.forward.median


def test_our_rates_are_the_published_ones_for_hand_made_schedules() -> None:
    result = bubbles.run(lines=1)
    (row,) = result.found["rows"]
    for name in ("1f1b", "zb-h1", "zb-h2"):
        assert row["rates"][name] == pytest.approx(row["published"][name], abs=5e-5)
    assert row["rates"]["auto, 2x"] <= row["published"]["auto, 2x"]
    assert "0.2431 (0.2431)" in result.text
    assert published_costs(RATES[0]).kept_for_weight_grad == pytest.approx(0.3664, abs=1e-4)


@pytest.mark.slow
def test_what_a_step_holds_is_measured_in_every_way() -> None:
    result = largest.run(models=("Transformer",), predicted=False, width=16, layers=3, devices=2)
    rows = result.found["rows"]
    held = {row["way"]: row["held"] for row in rows}
    assert list(held) == ["plain", "remat", "remat, M parts", "2 devices"]
    assert held["plain"] > held["remat"] > held["remat, M parts"] > held["2 devices"] > 0
    for row in rows:
        assert row["predicted"] == pytest.approx(row["held"], rel=0.25)
    assert "What a step holds, measured" in result.text


def test_the_published_models_fit_as_published() -> None:
    rows = {row["way"]: row for row in largest._published(["Transformer"], lambda _: None)}
    assert (rows["plain"]["layers"], rows["plain"]["published_size"]) == (3, [3])
    assert rows["8 devices"]["their_fullest"] <= rows["8 devices"]["memory"]
    assert rows["8 devices"]["layers"] >= 103
