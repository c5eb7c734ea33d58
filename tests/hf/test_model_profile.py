"""What models cost, from their configs alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gapless.plan.profile.profile import Profile
from tests.hf.configs import LARGE, SMALL, folder_of
from tests.model.hub import hub
from tests.plan.profile.test_blocks import flops_of, parameters_of


def profile_of(path: Path, config: dict[str, Any], **options: Any) -> tuple[Any, Profile]:
    """The model itself, without weights, and its profile."""
    hub()
    from gapless.hf.empty_model import built, config_of
    from gapless.hf.model_profile import model_profile

    folder = folder_of(path, config)
    return built(config_of(folder), "auto"), model_profile(folder, flops=1e12, **options)


@pytest.mark.slow  # tests/plan/profile/test_blocks.py has small ones
def test_few_blocks_stand_for_all_to_the_byte_and_to_the_flop(tmp_path: Path) -> None:
    model, profile = profile_of(tmp_path, SMALL | {"attn_implementation": "eager"}, length=16)
    assert [layer.name for layer in profile.layers[1:10]] == [f"{n + 1}.model.layers.{n}" for n in range(9)]
    buffers = model.model.rotary_emb.inv_freq.nbytes
    assert sum(layer.parameters for layer in profile.layers) == parameters_of(model) + buffers
    plain = type(model)(model.config)
    ids = torch.ones(1, 16, dtype=torch.long)
    with FlopCounterMode(display=False) as ahead:
        loss = plain(input_ids=ids, labels=ids).loss
    with FlopCounterMode(display=False) as back:
        loss.backward()
    # Under eager attention the sums of both are torch's; those with weights alone are W's.
    assert flops_of(profile, "forward") == ahead.get_total_flops()
    assert flops_of(profile, "backward") == flops_of(profile, "input_grad", "weight_grad") == back.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama-8b", "llama-70b", "mixtral"])
def test_large_models_are_foreseen_from_their_configs(kind: str, tmp_path: Path) -> None:
    model, profile = profile_of(tmp_path, LARGE[kind], length=2048)
    assert sum(layer.parameters for layer in profile.layers) == pytest.approx(parameters_of(model), rel=1e-6)
    assert sum(layer.optimizer_state for layer in profile.layers) == pytest.approx(2 * parameters_of(model), rel=1e-6)
    assert len(profile.layers) == model.config.num_hidden_layers + 2
    config = model.config
    experts = getattr(config, "num_local_experts", 1)
    idle = (
        0
        if experts == 1
        else config.num_hidden_layers * (experts - 2) * 3 * config.hidden_size * config.intermediate_size
    )
    products = parameters_of(model) // 2 - config.vocab_size * config.hidden_size - idle
    attention = config.num_hidden_layers * 2 * 2048 * config.hidden_size
    assert flops_of(profile, "forward") == pytest.approx(2048 * 2 * (products + attention), rel=1e-3)
