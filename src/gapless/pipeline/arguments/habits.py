"""What users of torch and of other pipeline libraries try first: it works here too, or they are told what does."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar

from gapless.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

# Options of other libraries, and what they are here.
_MEANT = {
    **dict.fromkeys(
        (
            "num_microbatches",
            "n_microbatches",
            "num_micro_batches",
            "micro_batches",
            "microbatch",
            "chunks",
            "n_chunks",
        ),
        "microbatches=, how many parts a minibatch is cut into",
    ),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "micro_batch_size", "microbatch_size"),
        "microbatches=, how many parts a minibatch is cut into (not how large one is)",
    ),
    **dict.fromkeys(("balance", "split_points", "split_spec", "split_policy"), "partition=, the layers of each stage"),
    **dict.fromkeys(("loss_fn", "criterion", "loss_function"), "loss=, a function of two: outputs, target"),
    **dict.fromkeys(
        ("num_stages", "num_devices", "n_devices", "device", "device_ids", "gpus", "world_size"),
        "devices=, a number or a list of devices",
    ),
    **dict.fromkeys(("device_mesh", "group", "pp_group", "process_group"), "mesh=, a DeviceMesh with a dimension pp"),
    **dict.fromkeys(
        ("checkpoint", "activation_checkpointing", "gradient_checkpointing", "recompute", "checkpoint_interval"),
        "remat='stage' or 'layer'",
    ),
    **dict.fromkeys(("pp_schedule", "pipeline_schedule"), "schedule=, a name from `gapless schedules`"),
    **dict.fromkeys(("example_args", "mb_args", "example_inputs", "sample_input"), "example=, inputs to trace it with"),
    **dict.fromkeys(("num_model_chunks", "virtual_stages", "interleave"), "stages_per_device="),
    "deferred_batch_norm": "batchnorm='deferred'",
    "optimizer": "no optimizer: make one from pipe.parameters() and step it after pipe.step, or use pipe.stream",
}

# What a pipeline does not have, and what to do in place of it.
_ELSEWHERE = {
    **dict.fromkeys(
        ("to", "cuda", "cpu"),
        "say where it runs with devices= when it is made; module() is the model, to be moved later",
    ),
    **dict.fromkeys(
        ("half", "bfloat16", "float", "double"),
        "convert the model before the pipeline is made, or call step inside torch.autocast",
    ),
    "generate": "generate with the trained model: pipe.module().generate(...), on one device",
    "push_to_hub": "write the model with pipe.save_pretrained(folder), and upload that folder",
    "forward": "evaluate(x).outputs are the model's outputs, and step(x, y) trains",
    "backward": "step has computed the gradients already: step the optimizer",
    "train_batch": "step(x, y) computes gradients; then step the optimizer",
    "eval_batch": "evaluate(x, y) returns the loss and the outputs",
}


def explained(call: Callable[P, R]) -> Callable[P, R]:
    """A public call that answers a keyword which it does not have with the one that was meant."""
    known = [name for name in inspect.signature(call).parameters if name != "self"]
    name = "Pipeline" if call.__name__ == "__init__" else call.__name__

    @functools.wraps(call)
    def answered(*args: P.args, **kwargs: P.kwargs) -> R:
        if name == "Pipeline" and len(args) > 2:  # beside the object itself and the model
            raise ConfigError(f"Pipeline takes only the model without a name: {_positional(args[2])}")
        for word in kwargs:
            if word not in known:
                raise ConfigError(f"{name} has no option {word}=: {_meant(word, known)}")
        return call(*args, **kwargs)

    return answered


def _positional(given: object) -> str:
    return (
        f"write Pipeline(model, devices={given}, ...)" if isinstance(given, int) else "write the others as name=value"
    )


def _meant(word: str, known: list[str]) -> str:
    if word in _MEANT:
        return f"use {_MEANT[word]}"
    near = get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}=?" if near else f"it has {', '.join(known)}"


def not_here(pipeline: object, name: str) -> AttributeError:
    """For an attribute that a pipeline does not have."""
    if name in _ELSEWHERE:
        return AttributeError(f"a Pipeline has no {name}(): {_ELSEWHERE[name]}")
    near = get_close_matches(name, [each for each in dir(type(pipeline)) if not each.startswith("_")], n=1)
    told = f": did you mean {near[0]}?" if near else ""
    return AttributeError(
        f"{type(pipeline).__name__!r} object has no attribute {name!r}{told}", name=name, obj=pipeline
    )


def check_model(model: object) -> None:
    """It is one, and not its name."""
    if isinstance(model, str):
        raise ConfigError(
            f"model is {model!r:.60}, a name, but a Pipeline takes the model itself: for one of Hugging Face's, "
            f"AutoModelForCausalLM.from_pretrained({model!r:.60})"
        )


@contextlib.contextmanager
def pairs_told(inputs: Any, target: Any) -> Iterator[None]:
    """Around a call: if it fails for what a loader makes, which is often [inputs, target], the error says so."""
    try:
        yield
    except Exception as error:
        if isinstance(inputs, list) and len(inputs) == 2 and target is None:
            error.add_note(
                "the batch is a list of 2, without a target: give inputs and target as two arguments, (x, y)"
            )
        raise


def batch_of(inputs: Any, named: Mapping[str, Any], call: str) -> Any:
    """What `step(**batch)` is given is a batch, as the dict itself would be."""
    if not named:
        if inputs is None:
            raise ConfigError(f"{call} has no batch: give it the inputs, and a target where there is a loss=")
        return inputs
    if inputs is not None:
        raise ConfigError(
            f"{call} has both inputs and {', '.join(named)}=: give one batch, as a dict or as keywords; the options of "
            f"{call} are in its help"
        )
    return dict(named)
