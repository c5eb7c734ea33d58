"""Hugging Face models as a stranger brings them: default configs, of which nothing is changed but sizes and dropout.

No cache, attention or experts switch is set. Batches are padded on the right as a tokenizer pads them, labels are -100
there; the first half of the samples has no padding, so that a microbatch may be full or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.model.hub import made

VOCAB = 32
LENGTH = 7
Batch = dict[str, Tensor]


def text(samples: int, *, ignored: bool = True) -> Batch:
    """Tokens, their mask, and labels of which those at padding don't count."""
    ids = torch.randint(3, VOCAB, (samples, LENGTH))
    mask = torch.ones_like(ids)
    for sample in range(samples // 2, samples):
        mask[sample, LENGTH - 1 - sample % 3 :] = 0
    ids = torch.where(mask == 1, ids, 1)
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100) if ignored else ids}


def translated(samples: int) -> Batch:
    """Of another length than the source, and padded too."""
    source, target = text(samples), text(samples)
    return {**source, "labels": target["labels"][:, : LENGTH - 1].contiguous()}


def images(samples: int) -> Batch:
    return {"pixel_values": torch.randn(samples, 3, 8, 8), "labels": torch.randint(2, (samples,))}


def captioned(samples: int) -> Batch:
    captions = text(samples)
    del captions["labels"]
    return {**captions, "pixel_values": images(samples)["pixel_values"]}


def spoken(samples: int) -> Batch:
    return {"input_features": torch.randn(samples, 8, 12), "labels": text(samples)["labels"]}


DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
ENCODER = {key: value for key, value in DECODER.items() if key != "num_key_value_heads"}
HEAD = {"head_dim": 4}
TOKENS = {"pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 2}  # within the vocabulary
SIGHT = {**ENCODER, "image_size": 8, "patch_size": 4}
del SIGHT["vocab_size"], SIGHT["max_position_embeddings"]


def gpt2(dropout: float = 0.0, layers: int = 2) -> nn.Module:
    sizes = {"vocab_size": VOCAB, "n_positions": 16, "n_embd": 16, "n_layer": layers, "n_head": 4}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return made("GPT2LMHeadModel", "GPT2Config", **sizes, **rates)


def llama() -> nn.Module:
    return made("LlamaForCausalLM", "LlamaConfig", **DECODER)


def qwen2() -> nn.Module:
    return made("Qwen2ForCausalLM", "Qwen2Config", **DECODER)


def qwen3() -> nn.Module:
    return made("Qwen3ForCausalLM", "Qwen3Config", **DECODER, **HEAD)


def mistral() -> nn.Module:
    return made("MistralForCausalLM", "MistralConfig", **DECODER, **HEAD)


def gemma2() -> nn.Module:
    return made("Gemma2ForCausalLM", "Gemma2Config", **DECODER, **HEAD, sliding_window=4)


def gemma3() -> nn.Module:
    return made("Gemma3ForCausalLM", "Gemma3TextConfig", **DECODER, **HEAD, sliding_window=4)


def gpt_neox() -> nn.Module:
    return made("GPTNeoXForCausalLM", "GPTNeoXConfig", **ENCODER)


def opt(**switches: Any) -> nn.Module:
    return made(
        "OPTForCausalLM",
        "OPTConfig",
        vocab_size=VOCAB,
        hidden_size=16,
        ffn_dim=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        word_embed_proj_dim=16,
        dropout=0.0,
        **switches,
    )


def bert() -> nn.Module:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return made("BertForMaskedLM", "BertConfig", **ENCODER, **dropout)


def t5() -> nn.Module:
    sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    return made("T5ForConditionalGeneration", "T5Config", **sizes, dropout_rate=0.0, decoder_start_token_id=0)


def vit() -> nn.Module:
    return made("ViTForImageClassification", "ViTConfig", **SIGHT)


def clip() -> nn.Module:
    return made("CLIPModel", "CLIPConfig", text_config={**ENCODER, **TOKENS}, vision_config=SIGHT, projection_dim=8)


def whisper() -> nn.Module:
    return made(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        vocab_size=VOCAB,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_source_positions=6,
        max_target_positions=16,
        decoder_start_token_id=1,
        **TOKENS,
    )


def wav2vec2(**switches: Any) -> nn.Module:
    """For transcripts; each sample is 70 numbers long."""
    rates = ("hidden", "attention", "activation", "feat_proj", "final")
    return made(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        **ENCODER,
        **dict.fromkeys((f"{rate}_dropout" for rate in rates), 0.0),
        conv_dim=(8, 8),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        **switches,
    )


def mixtral(**switches: Any) -> nn.Module:
    sizes = {**DECODER, "num_hidden_layers": 1, "num_local_experts": 4}
    return made("MixtralForCausalLM", "MixtralConfig", **sizes, **switches)


def qwen3_moe() -> nn.Module:
    experts = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
    return made("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **DECODER, **HEAD, **experts)


def mamba() -> nn.Module:
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
    return made("MambaForCausalLM", "MambaConfig", **sizes)


STRANGERS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "gpt2": (gpt2, text),
    "llama": (llama, text),
    "qwen2": (qwen2, text),
    "qwen3": (qwen3, text),
    "mistral": (mistral, text),
    "gemma2": (gemma2, text),
    "gemma3": (gemma3, text),
    "gpt_neox": (gpt_neox, text),
    "opt": (opt, text),
    "bert": (bert, text),
    "t5": (t5, translated),
    "vit": (vit, images),
    "clip": (clip, captioned),
    "whisper": (whisper, spoken),
    "mixtral": (mixtral, text),
    "qwen3_moe": (qwen3_moe, text),
    "mamba": (mamba, text),
}
