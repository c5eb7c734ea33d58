"""The GPT of the zoo is causal, and gives the same bits in stages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gapless.zoo.gpt import gpt, next_token_loss
from tests.stage.exactness import assert_same_as_plain


@pytest.mark.parametrize(
    "context", [contextlib.nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)], ids=["float", "autocast"]
)
def test_in_stages_it_gives_the_bits_of_the_plain_loop(context: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = gpt(vocab=19, width=16, depth=2, heads=2, context=8, dropout=0.1)
    ids = torch.randint(19, (6, 8))
    assert_same_as_plain(list(model), ids, ids.roll(-1, 1), loss=next_token_loss, cuts=(1, 3), context=context)


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
