"""A model of Hugging Face's that has shapes and no weights, and knows where they are: each process of a pipeline then
reads those of its own stages and no others.

    config.json -> the model, its parameters on the meta device -> Pipeline: traced, cut -> weights, a stage at a time

What a constructor computes, such as the frequencies of rotary embeddings, is there.

PEFT brings an adapter to the device of the layer that it adapts, and on the meta device it would lose its values: so
while it looks, the weights seem to be on the CPU, without memory there. What learns is then in every process, which is
little; the rest is read by the process that needs it.
"""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from torch import nn

from gapless.errors import ConfigError, optional, printable
from gapless.hf.hub_weights import HubWeights
from gapless.model.materialise import homes_in, materialise
from gapless.model.traced.hollow import hollow
from gapless.pipeline.pipeline import Pipeline

_FILES = ("*.json", "*.safetensors")


def load(
    source: str | Path,
    *,
    dtype: Any = "auto",
    model_class: Any = None,
    peft_config: Any = None,
    seed: int = 0,
    **options: Any,
) -> Pipeline:
    """A pipeline of a Hugging Face model, which no process ever holds as a whole. `options` are those of
    `gapless.Pipeline`; all else is as in `empty_model`.
    """
    model = empty_model(source, dtype=dtype, model_class=model_class, peft_config=peft_config, seed=seed)
    return Pipeline(model, seed=seed, **options)


def empty_model(
    source: str | Path, *, dtype: Any = "auto", model_class: Any = None, peft_config: Any = None, seed: int = 0
) -> Any:
    """A model without weights, for `gapless.Pipeline` or `PipelineTrainer`, which read those that they need.

    source       a folder that `save_pretrained` wrote, or the name of a model on the Hub. A folder without weights
                 gives a new model
    dtype        of the weights; "auto": as the config says
    model_class  such as `AutoModelForSequenceClassification`; by default the one that the config names
    peft_config  such as `peft.LoraConfig(...)`: the model is one of PEFT, with adapters as `get_peft_model` makes them
    seed         for adapters, and weights that are not in the files, such as a new head: they do not depend on the
                 number of devices
    """
    folder = folder_of(source, _FILES)
    model = built(config_of(folder), dtype, model_class)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    model.gapless_weights = HubWeights(model, folder, seed)
    return model if peft_config is None else adapted(model, peft_config, seed)


def built(config: Any, dtype: Any, model_class: Any = None) -> Any:
    """The model of a config with its parameters on the meta device; nobody knows their values."""
    kind = _class_of(config, model_class)
    wanted = getattr(config, "dtype", None) if dtype == "auto" else dtype
    if isinstance(wanted, str):
        wanted = getattr(torch, (name := wanted), None)
        if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
            raise ConfigError(f"dtype is {printable(name)!r}, but weights have a type such as bfloat16 or float32")
    with accelerate.init_empty_weights(include_buffers=False):
        options = {} if wanted is None else {"dtype": wanted}
        model: Any = (
            kind.from_config(config, **options)
            if hasattr(kind, "from_config")
            else kind._from_config(config, **options)
        )
    model.tie_weights()
    plan = {} if wanted is None else model._get_dtype_plan(wanted)
    for name, parameter in model.named_parameters():
        for kept in (dtype for part, dtype in plan.items() if part in name):  # Hugging Face has these in another type
            parameter.data = parameter.data.to(kept)
    return model


def folder_of(source: str | Path, files: Iterable[str]) -> Path:
    """The folder with these files, from the Hub if it is none here."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(str(source), allow_patterns=list(files)))
    except (errors.HFValidationError, errors.RepositoryNotFoundError):
        raise ConfigError(f"{printable(source)} is neither a folder here nor a model on the Hub") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError):
        raise ConfigError(
            f"{printable(source)} is no folder here, it is not in the cache of the Hub, and the Hub can't be "
            "reached: give a folder, or download it where there is a network"
        ) from None


def config_of(folder: Path) -> Any:
    """What the folder's config.json says, if a model of it can be trained."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{printable(folder)} has no config.json: give a folder that save_pretrained wrote")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError) as error:
        first = next(iter(str(error).splitlines()), "")
        if "custom code" in first:
            raise ConfigError(
                f"{printable(folder)} has its own model code, which gapless does not run: build the model on the meta "
                "device, and pass it to gapless.Pipeline with init="
            ) from None
        raise ConfigError(f"{printable(folder / 'config.json')}: {printable(first)[:200]}") from None
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{printable(folder)} has quantised weights, which can't be trained: use a model that is not quantised"
        )
    return config


def _class_of(config: Any, asked: Any) -> Any:
    if asked is not None:
        return asked
    name = next(iter(getattr(config, "architectures", None) or ()), None)
    if name is None:
        raise ConfigError(
            "the config names no architecture: give model_class=, such as transformers.AutoModelForCausalLM"
        )
    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(
            f"transformers has no {printable(name)}: for code from the Hub build the model on the meta device, and "
            "pass it to gapless.Pipeline with init="
        )
    return found


_WITHOUT_WEIGHTS = ("gaussian", "orthogonal")


def adapted(model: Any, config: Any, seed: int) -> Any:
    """`peft.get_peft_model(model, config)` after `torch.manual_seed(seed)`."""
    peft = optional("peft", "peft_config= needs peft, which is missing: pip install peft")
    init = getattr(config, "init_lora_weights", None)
    if getattr(config, "use_dora", False) or not (isinstance(init, bool) or init in _WITHOUT_WEIGHTS):
        raise ConfigError(
            f"peft_config is a {type(config).__name__} with use_dora={getattr(config, 'use_dora', None)} and "
            f"init_lora_weights={init!r}, but without weights only plain LoRA can start, whose adapters do not need "
            "them: leave both out, or adapt a model from from_pretrained"
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
