"""A causal language model of Hugging Face's transformers, from a local folder or from a config alone. Nothing is
downloaded.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gapless.errors import ConfigError, optional

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def causal_language_model(
    folder: Path, path: str | None = None, weights: bool | None = None, **settings: Any
) -> nn.Module:
    """`path` is a folder with a config.json, and the weights if it has some, or a config.json; `settings` are those of
    a config: `{ model_type = "gpt2", n_layer = 4 }`. `weights = false` starts from new ones.
    """
    library = optional("transformers", "model: huggingface needs the package transformers: pip install transformers")
    given: dict[str, Any] = {}
    place = None if path is None else folder / path
    if place is not None:
        file = place / "config.json" if place.is_dir() else place
        if not file.is_file():
            raise ConfigError(
                f"model.arguments: path is {path!r}, but there is no {file}: name a folder or a config.json"
            )
        try:
            given = json.loads(file.read_text("utf-8"))
        except ValueError as error:
            raise ConfigError(f"model: {file} is not JSON: {str(error)[:100]}") from None
    given = {**given, **settings}
    kind = given.pop("model_type", None)
    if not isinstance(kind, str):
        raise ConfigError(
            "model.arguments: model_type is missing: gpt2, llama or another of transformers, or give path"
        )
    try:
        config = library.AutoConfig.for_model(kind, **given)
    except ValueError:
        raise ConfigError(f"model: transformers knows no model_type {kind!r:.60}") from None
    stored = place is not None and place.is_dir() and any((place / name).is_file() for name in _WEIGHTS)
    if weights and not stored:
        raise ConfigError(f"model.arguments: weights is true, but {place} has no {_WEIGHTS[0]}: leave it out")
    if stored and weights is not False:
        made: nn.Module = library.AutoModelForCausalLM.from_pretrained(
            str(place), config=config, local_files_only=True, dtype=torch.float32
        )
    else:
        made = library.AutoModelForCausalLM.from_config(config)
    return made
