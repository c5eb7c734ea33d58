"""What a user asks of a stream, checked: each for itself, with the model, and what the functions of the user make."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from gapless.errors import ConfigError
from gapless.guards.weights_and_gradients import LOOSE_TENSORS
from gapless.guards.whole_model import LEFT_OUT_PARAMETERS
from gapless.model.traced.capture import Captured
from gapless.pipeline.options import Options
from gapless.pipeline.staged_model import StagedModel
from gapless.run.streams.nesterov import DelayedNesterov

from .checks import at_least_one, one_of

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
MakeScheduler = Callable[[Optimizer], Any]
Correction = Literal["spectrain", "nesterov"]


class StreamArguments(NamedTuple):
    """Of a stream, as `Pipeline.stream` takes it."""

    optimizer: MakeOptimizer | None
    scheduler: MakeScheduler | None
    vertical: bool
    clip: float | None
    correction: Correction | None
    lr: float | None
    lr_by_delay: int | None
    in_flight: int | None
    split: bool


def check_asked(asked: StreamArguments, recipe: str, *, in_turns: bool) -> None:
    """Each for itself, whatever the model is."""
    _, scheduler, vertical, clip, _, _, annealed_over, in_flight, split = asked
    if annealed_over is not None:
        at_least_one("lr_by_delay", annealed_over)
    if vertical and recipe != "pipedream":
        raise ConfigError(f"vertical=True is for pipedream, and the schedule is {recipe}: leave it out")
    if clip is not None and not (_is_number(clip) and clip > 0):
        raise ConfigError(f"clip is {clip!r}, but it must be a norm above 0")
    for word, value in (("vertical", vertical), ("split", split)):
        if not isinstance(value, bool):
            raise ConfigError(f"{word} is {value!r:.40}, but it must be True or False")
    if scheduler is not None and not callable(scheduler):
        raise ConfigError(
            "every stage has a scheduler of its own: pass a function that makes one, as scheduler=lambda optimizer: "
            "torch.optim.lr_scheduler.StepLR(optimizer, 100)"
        )
    if in_flight is not None:
        at_least_one("in_flight", in_flight)
    if vertical and in_turns:
        raise ConfigError(
            "vertical=True gives a minibatch one version at all stages, but stages with different replicas have made "
            "different updates: leave it out, or leave out replicas="
        )


def maker_of(optimizer: Any, correction: Correction | None, lr: float | None) -> MakeOptimizer:
    """What makes the optimizers, by default that of a correction that is one."""
    if correction is not None:
        one_of("correction", correction, get_args(Correction))
    if correction == "nesterov":
        if lr is not None and not (_is_number(lr) and lr >= 0):
            raise ConfigError(f"lr is {lr!r:.40}, but it must be a number of at least 0")
        if optimizer is not None:
            raise ConfigError("correction='nesterov' is an optimizer itself: leave optimizer= out, and give lr=")
        return DelayedNesterov if lr is None else partial(DelayedNesterov, lr=lr)
    if lr is not None:
        raise ConfigError("lr= is for correction='nesterov': give the learning rate to your optimizer")
    if isinstance(optimizer, Optimizer) or not callable(optimizer):
        raise ConfigError(
            "a stream has an optimizer for each stage, which it steps as soon as the stage's gradients are there: pass "
            "a function that makes one, as optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
        )
    made: MakeOptimizer = optimizer
    return made


def check_streamable(staged: StagedModel, options: Options) -> None:
    """Whether the model can be trained without a flush."""
    if isinstance(staged.model, Captured) and not staged.stages:
        raise ConfigError(
            "the model is traced with its first batch, and a stream needs its stages before that: make the pipeline "
            "with example=inputs"
        )
    shared = [each for each, stages in staged.uses.items() if len(set(stages)) > 1]
    if shared:
        name = next((name for name, each in staged.module.named_parameters() if each is shared[0]), "a parameter")
        raise ConfigError(
            f"{name} is used by several stages, which update their weights at different times: untie it, or choose a "
            "partition that keeps its layers in one stage, or a schedule that is synchronous"
        )
    if options.graphs is True:
        raise ConfigError("CUDA graphs know one version of the weights, and a stream keeps several: leave out graphs=")
    if options.batchnorm == "deferred":
        raise ConfigError("batchnorm='deferred' waits for the end of a step, and a stream has none: use 'microbatch'")


def refuse_loose(parts: Iterable[Any], stage: int) -> None:
    """Tensors that learn but are nobody's parameters have no versions, and no optimizer of a stage gets them."""
    modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
    known = {parameter for module in modules for parameter in module._parameters.values()}
    for module in modules:
        for name, value in vars(module).items():
            held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            if name not in ("_parameters", "_buffers", "_modules") and any(
                isinstance(each, Tensor) and each.is_leaf and each.requires_grad and each not in known for each in held
            ):
                raise LOOSE_TENSORS.refusal(
                    f"{type(module).__name__}.{name} at stage {stage} has trainable tensors that are not parameters "
                    "of the model, so a stream has no versions of them",
                    "use nn.Parameter, or nn.ParameterList",
                )


def optimizer_of(make: MakeOptimizer, parameters: list[nn.Parameter], stage: int) -> Optimizer:
    """That of a stage, which has all its parameters and no others."""
    made = make(parameters)
    if not isinstance(made, Optimizer):
        raise ConfigError(f"optimizer= must make a torch.optim.Optimizer, but it made a {type(made).__name__}")
    if isinstance(made, torch.optim.LBFGS):
        raise ConfigError("LBFGS runs the model several times for an update, which a stream can't: use another")
    given = {id(each) for group in made.param_groups for each in group["params"]}
    if given != {id(each) for each in parameters}:
        raise LEFT_OUT_PARAMETERS.refusal(
            f"the optimizer of stage {stage} has {len(given)} parameters, but the stage has {len(parameters)} others"
        )
    return made


def scheduler_of(make: MakeScheduler, optimizer: Optimizer) -> Any:
    """One that can be stepped after each update."""
    made = make(optimizer)
    if isinstance(made, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau needs a metric at every step, which the stages of a stream do not have: use a "
            "scheduler that counts updates"
        )
    if not hasattr(made, "step"):
        raise ConfigError(f"scheduler= must make a scheduler with step(), but it made a {type(made).__name__}")
    return made


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
