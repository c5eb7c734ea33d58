"""The models of GPipe's tables: AmoebaNet-D (L, D) on images, and a Transformer of L layers as a language model.

The profile of a larger model is that of a smaller one with its cells repeated: cells of one group are alike but for the
first two, which still see what came before the group.
"""

from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F

from benchmarks.gpipe.operation_counts import counted
from gapless.plan.profile.profile import Layer, Profile
from gapless.zoo.amoebanet import amoebanet
from gapless.zoo.gpt import gpt, next_token_loss


def transformer_profile(layers: int, samples: int, width: int = 2048, tokens: int = 1024) -> Profile:
    """Without data: sequences of so many tokens, with heads of size 64 and 32,000 words."""
    small = _transformer(samples, width, tokens)
    embed, block, *rest = small.layers
    return replace(small, name=f"Transformer-{layers}", layers=(embed, *[block] * layers, *rest))


@cache
def _transformer(samples: int, width: int, tokens: int) -> Profile:
    with torch.device("meta"):
        model = gpt(vocab=32_000, width=width, depth=1, heads=width // 64, context=tokens)
        ids = torch.zeros(samples, tokens, dtype=torch.long)
    return counted("", list(model), ids, ids, next_token_loss)


def amoebanet_profile(cells: int, filters: int, samples: int, side: int = 224) -> Profile:
    """Without data: images of that many pixels each way."""
    if cells < 9:
        return _amoebanet(cells, filters, samples, side)
    small = _amoebanet(9, filters, samples, side)  # 3 in each group
    repeated: list[Layer] = []
    for number, layer in enumerate(small.layers):
        # 0 stem, 1 and 2 reductions, then three times: three cells and a reduction, or the head
        last_of_group = number in (5, 9, 13)
        repeated += [layer] * (cells // 3 - 2 if last_of_group else 1)
    return replace(small, name=f"AmoebaNet-D ({cells}, {filters})", layers=tuple(repeated))


@cache
def _amoebanet(cells: int, filters: int, samples: int, side: int) -> Profile:
    with torch.device("meta"):
        model = amoebanet(cells=cells, filters=filters)
        images, target = torch.empty(samples, 3, side, side), torch.zeros(samples, dtype=torch.long)
    return counted(f"AmoebaNet-D ({cells}, {filters})", list(model), images, target, F.cross_entropy)
