"""What a user may ask Trainer for, but not on a pipeline: refused by name, before anything runs."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import TrainingArguments

from gapless.errors import ConfigError
from gapless.pipeline.pipeline import Pipeline
from gapless.schedule.action import Schedule
from gapless.schedule.recipes import find_recipe

# Pipeline's arguments that have one of their own here, or that Trainer decides.
_DECIDED = (
    *("devices", "mesh", "microbatches", "schedule", "remat", "seed"),
    *("loss", "loss_weight", "init", "example", "batch_dims", "target_dims", "timeout", "transport"),
)
# How Trainer and its models name what recomputes activations, since transformers 5.23 and before.
_WHAT = "activation" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient"
CHECKPOINTING = f"{_WHAT}_checkpointing"


def check_arguments(args: Any, options: Mapping[str, Any]) -> None:
    """Of the TrainingArguments, and of more arguments for `Pipeline`, all faults at once."""
    if faults := [*_faults(args), *(_faults_of_ranks(args, options) if args.world_size > 1 else ())]:
        raise ConfigError("; ".join(faults))


def _faults(args: Any) -> Iterator[str]:
    for name in ("deepspeed", "fsdp", "parallelism_config"):
        if getattr(args, name, None):
            yield f"{name}= distributes training in its own way: leave it out, or use transformers.Trainer"
    if getattr(args, "predict_with_generate", False):
        yield (
            "predict_with_generate=True generates token by token, which a pipeline can't: leave it out, and call "
            "trainer.model.generate after training"
        )
    if args.torch_compile:
        yield 'torch_compile=True compiles the whole model: leave it out, and give pipeline={"compile": True}'
    for name in ("fp16_full_eval", "bf16_full_eval"):
        if getattr(args, name):
            yield (
                f"{name}=True moves the model to one device and to another type for good: leave it out, and evaluate "
                f"under autocast, with {name[:4]}=True"
            )
    if "lomo" in str(args.optim).lower():
        yield f"optim={getattr(args.optim, 'value', args.optim)!r} updates weights inside a backward: choose another"


def _faults_of_ranks(args: Any, options: Mapping[str, Any]) -> Iterator[str]:
    """What is for one process only."""
    if args.fp16:
        yield "fp16=True scales gradients on each rank alone: use bf16=True under torchrun, or one process"
    if args.auto_find_batch_size:
        yield "auto_find_batch_size=True may find another size on each rank: leave it out under torchrun"
    if args.accelerator_config.dispatch_batches:
        yield "dispatch_batches=True has rank 0 send parts of a batch to each rank: leave it out under torchrun"
    if getattr(args, "eval_use_gather_object", False):
        yield "eval_use_gather_object=True gathers from all ranks, and not from pipelines: leave it out under torchrun"
    if "layers" in options:
        yield "pipeline= has layers, of which a rank keeps its own alone: leave it out, or use gapless.Pipeline"


def check_model(model: Any) -> None:
    """It is in one piece."""
    spread = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(spread) > 1:
        raise ConfigError(
            f"device_map= has spread the model over {len(spread)} devices, and the pipeline does that itself: load it "
            "without device_map"
        )


def check_pipeline(schedule: Any, options: Any) -> None:
    """A schedule for any number of batches, and more arguments for `Pipeline`: none that is given in another way."""
    if isinstance(schedule, Schedule):
        raise ConfigError(
            f"the schedule is for {schedule.num_microbatches} microbatches and no other number, but the last update of "
            "an epoch and an evaluation may have fewer: pass its name, or a Plan"
        )
    if isinstance(schedule, str) and not find_recipe(schedule).synchronous:
        raise ConfigError(
            f"schedule={schedule!r} updates weights inside the schedule, but Trainer updates them once for all "
            "batches: choose another, such as '1f1b' or 'zb-v'"
        )
    if not isinstance(options, Mapping):
        raise ConfigError(f"pipeline is a {type(options).__name__}, but it must be a dict of arguments of Pipeline")
    if unknown := [name for name in options if name not in inspect.signature(Pipeline).parameters]:
        raise ConfigError(f"pipeline= has {', '.join(map(repr, unknown))}, which gapless.Pipeline does not take")
    if decided := [name for name in options if name in _DECIDED]:
        raise ConfigError(
            f"pipeline= has {', '.join(decided)}, which PipelineTrainer decides: give devices, schedule, microbatches "
            "and remat to PipelineTrainer itself, and the seed, the loss and the data to Trainer as usual"
        )
