"""What `Pipeline.training` is given, and what it can't take: steps that are made in parts, and undone, must leave no
trace outside of the optimizer's state.
"""

import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.amp import GradScaler
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from gapless.errors import ConfigError
from gapless.run.clip import refuse_lbfgs
from gapless.run.world import World
from gapless.stage.offload.optimizer_state import OffloadedStep

_INSTEAD = "use pipe.step and optimizer.step()"
_OWN = {"step", "_opt_called", "_step_count", "_step_supports_amp_scaling", "_need_device_dtype_check_for_fused"}


class Asked(NamedTuple):
    """What is asked for."""

    max_norm: float | None
    scheduler: Any
    skip_nonfinite: bool
    scaler: Any = None


def check_training(optimizer: Any, asked: Asked) -> None:
    """Raises for an optimizer whose step can't be made in parts, or undone."""
    if asked.max_norm is not None and not asked.max_norm > 0:
        raise ConfigError(f"max_norm is {asked.max_norm!r}, but it must be above 0: leave it out to clip nothing")
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__}, but training takes a torch.optim.Optimizer made from "
            "pipe.parameters()"
        )
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(f"{name} steps with a closure, which computes a loss again: {_INSTEAD}")
    every = vars(Optimizer([Parameter()], {})).keys()  # not when it is imported: torch takes two seconds for the first
    if extra := sorted(vars(optimizer).keys() - every - _OWN):
        raise ConfigError(
            f"{name} keeps {', '.join(extra)} outside of its state and param_groups, where a step can't be undone: "
            f"keep it there, or {_INSTEAD}"
        )
    replaced = vars(optimizer).get("step")
    if isinstance(replaced, OffloadedStep):
        raise ConfigError(f"the state of this {name} is in host memory, where a step can't be undone: {_INSTEAD}")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        raise ConfigError(f"the step of this {name} was replaced, and its parts would not call that: {_INSTEAD}")
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *_global_optimizer_pre_hooks.values()]
    hooks += [*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()]
    if any(each is not refuse_lbfgs for each in hooks):
        raise ConfigError(f"{name} has step hooks, which would see parts of a step: remove them, or {_INSTEAD}")
    scaler = asked.scaler
    if scaler is not None and getattr(type(scaler), "update", None) is not GradScaler.update:
        raise ConfigError(
            f"scaler is a {type(scaler).__name__}, but training takes a torch.amp.GradScaler: give one, or use "
            "pipe.step(..., scaler=) and scaler.step(optimizer)"
        )
    if (scheduler := asked.scheduler) is None:
        return
    if "metrics" in inspect.signature(scheduler.step).parameters:
        raise ConfigError(
            f"{type(scheduler).__name__} steps with a metric, which training does not have: leave it out, and step it "
            "yourself after training.settle()"
        )
    if scheduler.optimizer is not optimizer:
        raise ConfigError(f"the {type(scheduler).__name__} is for another optimizer: make it from the one given here")


def check_parameters(optimizer: Optimizer, known: Iterable[Parameter], world: World, *, scaled: bool) -> None:
    """All are the pipeline's, and whole. A rank without any has an empty one."""
    own = {*known}
    found = [each for group in optimizer.param_groups for each in group["params"]]
    if strangers := sum(each not in own and (world.one_process or each.numel() > 0) for each in found):
        raise ConfigError(
            f"{strangers} of {len(found)} parameters of the optimizer are not the pipeline's: make it from "
            "pipe.parameters()"
        )
    if any(hasattr(each, "full_tensor") for each in found):
        raise ConfigError(f"parameters are sharded (FSDP or tp), whose steps can't be undone yet: {_INSTEAD}")
    if scaled and any(each.dtype == torch.float16 for each in found):
        raise ConfigError(
            "parameters are float16, whose gradients a GradScaler does not unscale: keep them in float32, and step "
            'inside of torch.autocast("cuda", torch.float16)'
        )
