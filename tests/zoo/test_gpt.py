"""The GPT of the zoo is causal; tests/pipelines.py has it in stages."""

from __future__ import annotations

import pytest
import torch

from gapless.zoo.gpt import gpt


def test_no_token_sees_a_later_one() -> None:
    model = gpt(vocab=19, width=16, depth=2, heads=2, context=8).eval()
    ids = torch.randint(19, (2, 8))
    other = ids.clone()
    other[:, 5:] = (ids[:, 5:] + 1) % 19
    assert torch.allclose(model(ids)[:, :5], model(other)[:, :5], atol=1e-6)
    assert not torch.allclose(model(ids)[:, 5:], model(other)[:, 5:])


def test_a_width_that_its_heads_can_t_share_is_refused() -> None:
    with pytest.raises(ValueError, match="a width of 63 can't be shared by 4 heads"):
        gpt(width=63, heads=4)
