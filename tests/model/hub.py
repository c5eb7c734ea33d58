"""Hugging Face's library, imported by the process that needs it, and not wherever tests are collected: that takes
seconds, in every one of several processes. And its models in small.
"""

from typing import Any

import pytest
import torch
from torch import nn

VOCAB = 24
_TOKENS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
_LAYER = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}


def hub() -> Any:
    """The library; a test is skipped where there is none."""
    return pytest.importorskip("transformers")


def made(name: str, config: str, **options: Any) -> nn.Module:
    model = getattr(hub(), name)(getattr(hub(), config)(**options))
    assert isinstance(model, nn.Module)
    return model.train()


def gpt2(dropout: float = 0.0, **options: Any) -> nn.Module:
    torch.manual_seed(3)
    sizes = {"n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "loss_type": "ForCausalLM"}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return made("GPT2LMHeadModel", "GPT2Config", **_TOKENS, **sizes, **rates, **options)


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(3)
    return made("LlamaForCausalLM", "LlamaConfig", **_TOKENS, **_LAYER, num_key_value_heads=1, **options)


def bert(head: str = "MaskedLM", **options: Any) -> nn.Module:
    torch.manual_seed(3)
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return made(f"BertFor{head}", "BertConfig", **_TOKENS, **_LAYER, **rates, **options)


def t5(**options: Any) -> nn.Module:
    torch.manual_seed(3)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    return made("T5ForConditionalGeneration", "T5Config", **_TOKENS, **sizes, decoder_start_token_id=0, **options)
