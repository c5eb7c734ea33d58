"""PEFT's adapters on a model without weights. PEFT brings an adapter to the device of the layer that it adapts, and on
the meta device it would lose its values: so while it looks, the weights seem to be on the CPU, without memory there.

What learns is then in every process, which is little; the rest is read by the process that needs it.
"""

import copy
from typing import Any

import torch
from torch import nn

from gapless.errors import ConfigError
from gapless.model.materialise import homes_in, materialise
from gapless.model.traced.hollow import hollow

_WITHOUT_WEIGHTS = ("gaussian", "orthogonal")


def adapted(model: Any, config: Any, seed: int) -> Any:
    """`peft.get_peft_model(model, config)` after `torch.manual_seed(seed)`."""
    try:
        import peft  # an extra of its own
    except ImportError:
        raise ConfigError("peft_config= needs peft, which is missing: pip install peft") from None

    init = getattr(config, "init_lora_weights", None)
    if getattr(config, "use_dora", False) or not (isinstance(init, bool) or init in _WITHOUT_WEIGHTS):
        raise ConfigError(
            f"peft_config is a {type(config).__name__} with use_dora={getattr(config, 'use_dora', None)} and "
            f"init_lora_weights={init!r}, but without weights only LoRA can start, whose adapters do not need them: "
            "leave both out, or adapt a model from from_pretrained"
        )
    empty = [each for each in model.parameters() if each.is_meta]
    for each in empty:  # a copy of a head that is to learn has no weights either
        each.__dict__["__deepcopy__"] = lambda memo, each=each: nn.Parameter(torch.empty_like(each), each.requires_grad)
    try:
        with hollow(model, torch.device("cpu")), torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(seed)
            made = peft.get_peft_model(model, copy.deepcopy(config))
            learns = {name: each.requires_grad for name, each in made.named_parameters(remove_duplicate=False)}
    finally:
        for each in empty:
            del each.__dict__["__deepcopy__"]
    for name, each in made.named_parameters(remove_duplicate=False):
        each.requires_grad_(learns[name])
    trained = [(part, name) for part, name in homes_in([made]) if getattr(getattr(part, name), "requires_grad", False)]
    materialise(made, trained, torch.device("cpu"), model.gapless_weights)
    return made
