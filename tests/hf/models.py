"""Small models of Hugging Face's, one of each kind, and a batch for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.hub import hub

# Experts are in pieces; GPT-2, with tied weights, is what ranks have.
KINDS = ("mixtral", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gpt2", "llama", "bert", "t5")))


def model_of(kind: str) -> Any:
    """Without dropout."""
    library, size = hub(), {"vocab_size": 64}
    torch.manual_seed(3)
    heads = {"hidden_size": 32, "num_attention_heads": 4}
    llama = {**size, **heads, "intermediate_size": 48, "num_key_value_heads": 2, "num_hidden_layers": 2}
    if kind == "llama":
        return library.LlamaForCausalLM(library.LlamaConfig(**llama, max_position_embeddings=64))
    if kind == "mixtral":
        return library.MixtralForCausalLM(
            library.MixtralConfig(**llama | {"num_hidden_layers": 1}, num_local_experts=4)
        )
    if kind == "gpt2":
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
        return library.GPT2LMHeadModel(
            library.GPT2Config(**size, n_embd=32, n_layer=1, n_head=4, n_positions=64, **off)
        )
    if kind == "bert":
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = library.BertConfig(**size, **heads, **off, num_hidden_layers=1, intermediate_size=48)
        return library.BertForSequenceClassification(config)
    config = library.T5Config(**size, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0)
    config.decoder_start_token_id = 0
    return library.T5ForConditionalGeneration(config)


def batch_of(kind: str, step: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(1, 64, (4, 10), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids[:, 0] % 2 if kind == "bert" else ids.clone()}


def lora_config(kind: str = "llama") -> Any:
    """With a head that learns as a whole, where there is a new one."""
    peft = pytest.importorskip("peft")
    task, targets = ("SEQ_CLS", ["query"]) if kind == "bert" else ("CAUSAL_LM", ["c_attn", "q_proj", "v_proj"])
    return peft.LoraConfig(r=2, target_modules=targets, task_type=task, fan_in_fan_out=kind == "gpt2")


def trained_plainly(model: Any, kind: str, steps: int) -> dict[str, Tensor]:
    """The loop that a user would write, over four microbatches."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(steps):
        batch = batch_of(kind, step)
        for m in range(4):
            (model(**{name: each[m : m + 1] for name, each in batch.items()}).loss / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.clone() for name, each in model.state_dict().items()}


def trained_in_stages(pipe: Any, kind: str, steps: int) -> None:
    optimizer = torch.optim.AdamW(pipe.parameters(), 1e-2)
    for step in range(steps):
        pipe.step(batch_of(kind, step))
        optimizer.step()
        optimizer.zero_grad()
