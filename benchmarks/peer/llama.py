"""A Llama as people have it: Hugging Face's, or by hand where transformers is not there. Whole for gapless, which cuts
it; in parts, as one cuts it by hand, for the others.
"""

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 32_000
_HEAD = 64  # numbers of an attention head


def whole(width: int, layers: int, tokens: int) -> nn.Module:
    """Its own loss is part of it: forward(input_ids, labels) has a `loss`."""
    if find_spec("transformers") is None:
        return ByHand(width, layers)
    from transformers import LlamaConfig, LlamaForCausalLM  # an optional extra

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // _HEAD,
        num_key_value_heads=min(8, width // _HEAD),
        max_position_embeddings=tokens,
        tie_word_embeddings=False,
        use_cache=False,
    )
    made: nn.Module = LlamaForCausalLM(config)
    return made


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """That of the next token, in float32."""
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


class LlamaPart(nn.Module):
    """Some of the layers; the first part has the embedding, the last one the head."""

    def __init__(self, model: Any, *, first: bool, last: bool) -> None:
        super().__init__()
        inner = model.model
        self.embed = inner.embed_tokens if first else None
        self.layers, self.rotary = inner.layers, inner.rotary_emb
        self.head = nn.Sequential(inner.norm, model.lm_head) if last else None

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.embed is None else self.embed(x)
        turns = self.rotary(h, torch.arange(h.shape[1], device=h.device)[None])
        for layer in self.layers:
            h = layer(h, position_embeddings=turns)
        return h if self.head is None else self.head(h)

    def compile_layers(self) -> None:
        """Each by itself: those of one kind are compiled once."""
        for layer in [*self.layers, *([] if self.head is None else [self.head])]:
            layer.compile()


class ByHand(nn.Module):
    """The same model with torch alone, under the same names."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.model: Any = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCAB, width)
        self.model.layers = nn.ModuleList(_LlamaLayer(width) for _ in range(layers))
        self.model.norm, self.model.rotary_emb = nn.RMSNorm(width, eps=1e-6), _Rotary()
        self.lm_head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = LlamaPart(self, first=True, last=True)(input_ids)
        return {"loss": loss(logits, labels), "logits": logits}


class _Rotary(nn.Module):
    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        steps = torch.arange(0, _HEAD, 2, device=x.device).float() / _HEAD
        angles = torch.cat([places[..., None].float() * 10_000.0**-steps] * 2, dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class _LlamaLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self._heads, self._few = width // _HEAD, min(8, width // _HEAD)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, self._few * _HEAD, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, width * 11 // 4, bias=False) for _ in range(2))
        self.down = nn.Linear(width * 11 // 4, width, bias=False)
        self.before, self.between = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)

    def forward(self, h: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        x, (batch, tokens, width) = self.before(h), h.shape
        q, k, v = (each(x).view(batch, tokens, -1, _HEAD).transpose(1, 2) for each in (self.q, self.k, self.v))
        q, k = (_turned(each, *position_embeddings) for each in (q, k))
        k, v = (each.repeat_interleave(self._heads // self._few, dim=1) for each in (k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.o(seen.transpose(1, 2).reshape(batch, tokens, width))
        x = self.between(h)
        found: Tensor = h + self.down(F.silu(self.gate(x)) * self.up(x))
        return found


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-right, left], dim=-1) * sin[:, None]
