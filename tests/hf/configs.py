"""Configs of models, in folders of their own."""

import json
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
LARGE: dict[str, dict[str, Any]] = {
    "llama-8b": LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "llama-70b": LLAMA
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "mixtral": {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "dtype": "bfloat16"},
}
SMALL: dict[str, Any] = LLAMA | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "dtype": "float32",
}


def folder_of(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path
