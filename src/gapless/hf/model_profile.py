"""What a Hugging Face model costs, from its config alone: no weight is read, and nothing is run."""

import inspect
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gapless.errors import ConfigError
from gapless.hf.empty_model import built, config_of, folder_of
from gapless.plan.profile.blocks import measure_blocks
from gapless.plan.profile.profile import Profile

LENGTH = 4096  # tokens, where the model takes as many


def model_profile(source: str | Path, *, flops: float, length: int | None = None, dtype: Any = "auto") -> Profile:
    """For microbatches of one sample. Times are FLOPs at this speed; the optimizer is AdamW.

    source  a folder with a config.json, or the name of a model on the Hub
    length  tokens of a sample; by default `LENGTH`, or what the model takes, if that is less
    dtype   of weights, gradients and optimizer state; "auto": as the config says
    """
    folder = folder_of(source, ("config.json",))
    model = built(config_of(folder), dtype)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    if length is not None and length > longest:
        raise ConfigError(f"the length is {length}, but {type(model).__name__} takes at most {longest} tokens")
    inputs = _example(model, length or min(LENGTH, longest))
    return replace(measure_blocks(model, inputs, flops=flops), name=type(model).__name__)


def _example(model: Any, length: int) -> dict[str, torch.Tensor]:
    """One sample: tokens, and labels for the loss that the model computes."""
    kind = type(model).__name__
    if model.main_input_name != "input_ids":
        raise ConfigError(
            f"a plan from a config is for models of tokens, but {kind} takes {model.main_input_name}: give the model "
            "and a batch to gapless.make_plan"
        )
    if "labels" not in inspect.signature(model.forward).parameters:
        raise ConfigError(f"{kind} has no loss: name a class with a head in its config, such as one ...ForCausalLM")
    ids = torch.ones(1, length, dtype=torch.long)
    labels = torch.ones(1, dtype=torch.long) if "SequenceClassification" in kind else ids.clone()
    return {"input_ids": ids, "labels": labels}
