"""A GPT as people write it: token and position embeddings, pre-norm blocks with causal attention, a final norm and a
head.

It is a sequence of layers, so a pipeline can cut it anywhere between them. The head has a weight of its own.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embed(nn.Module):
    """Tokens and their positions."""

    def __init__(self, vocab: int, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Any:
        positions = torch.arange(ids.size(1), device=ids.device)
        return self.dropout(self.tokens(ids) + self.positions(positions))


class CausalAttention(nn.Module):
    """Causal self-attention: no token sees a later one."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.p = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention, then a two-layer network, each on the normed stream and added to it."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Any:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.network(self.norm2(x)))


def gpt(
    *, vocab: int = 256, width: int = 256, depth: int = 8, heads: int = 4, context: int = 256, dropout: float = 0.0
) -> nn.Sequential:
    """`depth` blocks between the embedding and (norm, head); token numbers of shape (batch, length) in, logits out."""
    if heads < 1 or width % heads:
        raise ValueError(f"a width of {width} can't be shared by {heads} heads: give another width")
    return nn.Sequential(
        Embed(vocab, width, context, dropout),
        *(Block(width, heads, dropout) for _ in range(depth)),
        nn.LayerNorm(width),
        nn.Linear(width, vocab),
    )


def next_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """The mean cross entropy over all tokens; those marked -100 are left out."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())
