"""The encoder-decoder of the zoo masks what is not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gapless.zoo.transformer import transformer


def sentences(samples: int = 8) -> tuple[Any, Tensor]:
    """Source and target of different lengths, the last tokens of the source padding."""
    source, target = torch.randint(1, 13, (samples, 7)), torch.randint(1, 13, (samples, 5))
    source[:, 5:] *= torch.randint(2, (samples, 2))
    return (source, target), target.roll(-1, 1)


def test_no_token_of_the_target_sees_a_later_one() -> None:
    model = transformer(vocab=13, width=16, depth=2, heads=2, context=8).eval()
    (source, target), _ = sentences(2)
    other = target.clone()
    other[:, 3:] = other[:, 3:] % 12 + 1
    assert torch.allclose(model(source, target)[:, :3], model(source, other)[:, :3], atol=1e-6)
    assert not torch.allclose(model(source, target)[:, 3:], model(source, other)[:, 3:])


def test_padding_of_the_source_is_not_seen() -> None:
    model = transformer(vocab=13, width=16, depth=2, heads=2, context=8).eval()
    source, target = torch.randint(1, 13, (2, 5)), torch.randint(1, 13, (2, 4))
    padded = torch.cat([source, torch.zeros(2, 2, dtype=torch.long)], 1)
    assert torch.allclose(model(source, target), model(padded, target), atol=1e-5)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "millions"), [(6, 8192, 16, 400), (24, 8192, 16, 1300), (64, 16384, 32, 6000)]
)
def test_the_sizes_of_gpipe_have_as_many_parameters_as_published(
    layers: int, hidden: int, heads: int, millions: int
) -> None:
    with torch.device("meta"):
        sizes: dict[str, Any] = {"width": 1024, "depth": layers, "hidden": hidden, "heads": heads, "head_size": 64}
        model = transformer(vocab=64_000, one_vocabulary=True, **sizes)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert abs(count / (millions * 1e6) - 1) < 0.06


def test_heads_that_do_not_share_the_width_are_refused() -> None:
    with pytest.raises(ValueError, match="a width of 8 can't be shared by 3 heads: give head_size"):
        transformer(width=8, heads=3)


def cured() -> Any:
    return transformer(
        vocab=13,
        width=8,
        depth=2,
        heads=2,
        context=8,
        hidden=12,
        head_size=6,
        one_vocabulary=True,
        scaled_by_depth=True,
        clip_logits=0.3,
    )


def test_two_cures_for_depth() -> None:
    model = cured()
    torch.manual_seed(0)
    plain = transformer(vocab=13, width=8, depth=2, heads=2, context=8, hidden=12, head_size=6, one_vocabulary=True)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs / 2 if ".network." in name else theirs), name
    (source, target), _ = sentences(4)
    assert model(source, target).abs().max() <= 0.3 < plain(source, target).abs().max()
