"""An encoder-decoder transformer as people write it (Vaswani et al., 2017, with the norms before each part), for
translation: source tokens and target tokens in, logits of the next target tokens out.

Every layer of the decoder looks at the encoder's result, and padding is masked everywhere, so this is no sequence: a
pipeline has to trace it and to carry memory and masks along.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_PADDING = 0


class Attention(nn.Module):
    """Queries from one sequence; keys and values from the same or from another."""

    def __init__(self, width: int, heads: int, dropout: float, head_size: int) -> None:
        super().__init__()
        self.heads, self.p = heads, dropout
        self.query = nn.Linear(width, heads * head_size)
        self.key_value = nn.Linear(width, 2 * heads * head_size)
        self.out = nn.Linear(heads * head_size, width)

    def forward(self, x: Tensor, other: Tensor, mask: Tensor) -> Any:
        batch, length, _ = x.shape
        q = self.query(x).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = (
            part.view(batch, other.size(1), self.heads, -1).transpose(1, 2)
            for part in self.key_value(other).chunk(2, dim=-1)
        )
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class EncoderLayer(nn.Module):
    """Attention to the source, then a two-layer network."""

    def __init__(self, width: int, heads: int, dropout: float, head_size: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout, head_size)
        self.network = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y, y, mask))
        return x + self.dropout(self.network(self.norm2(x)))


class DecoderLayer(nn.Module):
    """Attention to the target so far, attention to the encoder's result, then a two-layer network."""

    def __init__(self, width: int, heads: int, dropout: float, head_size: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout, head_size)
        self.across = Attention(width, heads, dropout, head_size)
        self.network = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor, memory_mask: Tensor) -> Any:
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y, y, mask))
        x = x + self.dropout(self.across(self.norm2(x), memory, memory_mask))
        return x + self.dropout(self.network(self.norm3(x)))


class Transformer(nn.Module):
    """Source (batch, length) and target (batch, other length) token numbers in, where 0 is padding; `depth` layers in
    the encoder and as many in the decoder.

    hidden            the width inside the two-layer networks; 4 times `width` if it is not given
    head_size         of each head of attention; `width` / `heads` if it is not given
    one_vocabulary    source and target share their embedding; the head has a weight of its own
    scaled_by_depth   the two-layer networks start smaller by the number of layers \\  GPipe's two cures for very deep
    clip_logits       the most that a logit may be, either way                      /  models, which else diverge
    """

    def __init__(
        self,
        *,
        vocab: int = 256,
        width: int = 256,
        depth: int = 4,
        heads: int = 4,
        context: int = 256,
        dropout: float = 0.0,
        hidden: int | None = None,
        head_size: int | None = None,
        one_vocabulary: bool = False,
        scaled_by_depth: bool = False,
        clip_logits: float | None = None,
    ) -> None:
        super().__init__()
        if head_size is None and width % heads:
            raise ValueError(f"a width of {width} can't be shared by {heads} heads: give head_size, or another width")
        self.scale, self.clip_logits = math.sqrt(width), clip_logits
        self.source_tokens = nn.Embedding(vocab, width)
        self.target_tokens = self.source_tokens if one_vocabulary else nn.Embedding(vocab, width)
        sizes = (width, heads, dropout, head_size or width // heads, hidden or 4 * width)
        self.register_buffer("positions", _waves(context, width), persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.ModuleList(EncoderLayer(*sizes) for _ in range(depth))
        self.memory_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(DecoderLayer(*sizes) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)
        if scaled_by_depth:
            self._scale_networks(1 / depth)

    @torch.no_grad()
    def _scale_networks(self, factor: float) -> None:
        for layer in (*self.encoder, *self.decoder):
            for parameter in layer.network.parameters():
                parameter.mul_(factor)

    def forward(self, source: Tensor, target: Tensor) -> Any:
        there = (source != _PADDING)[:, None, None, :]  # (batch, heads, queries, keys)
        x = self._embedded(self.source_tokens, source)
        for layer in self.encoder:
            x = layer(x, there)
        memory = self.memory_norm(x)
        length = target.size(1)
        earlier = torch.ones(length, length, dtype=torch.bool, device=target.device).tril()
        y = self._embedded(self.target_tokens, target)
        for layer in self.decoder:
            y = layer(y, earlier, memory, there)
        logits = self.head(self.norm(y))
        return logits if self.clip_logits is None else logits.clamp(-self.clip_logits, self.clip_logits)

    def _embedded(self, tokens: nn.Embedding, ids: Tensor) -> Any:
        positions: Tensor = self.get_buffer("positions")
        return self.dropout(tokens(ids) * self.scale + positions[: ids.size(1)])


transformer = Transformer  # under the name that a config has for it


def translation_loss(logits: Tensor, target: Tensor) -> Tensor:
    """The mean cross entropy over all tokens that are no padding."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=_PADDING)


def _waves(context: int, width: int) -> Tensor:
    """Positions as sines and cosines of wavelengths from 2 pi to 20,000 pi."""
    angles = torch.arange(context)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :width]
