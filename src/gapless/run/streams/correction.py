"""What a stage can do about delayed gradients: the formulas, each with its source. Nothing here runs by itself.

A stage reads weights for the forward of a minibatch, and makes s updates before it applies the gradient that they gave:
s is the delay. Two remedies:

    predicted weights         p - s lr d     the forward takes the weights that s more updates are expected to give
    learning rate by delay    lr / s^e       the update of a gradient that is s updates old is smaller, at first

    p   the weights of the version that is read      d   the direction that its optimizer has been moving them in
    lr  the learning rate of the weights' group      e   goes from 1 to 0

A third one is an optimizer: `nesterov.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from gapless.errors import ConfigError


def predictions(optimizer: Optimizer, updates: int) -> dict[Tensor, Tensor]:
    """What each parameter of the optimizer is expected to be after so many more updates: p - (updates * lr) * d, in
    this order of operations, a tensor of its own; parameters and optimizer stay as they are.

    SpecTrain (Chen, Yang and Cheng, arXiv 1809.02839) predicts W - s * lr * v, with v the smoothed gradient of SGD with
    momentum. Here the smoothed direction d is, with the learning rate of the parameter's own group,

        SGD             the momentum buffer as torch keeps it. It has the decay of the weights in it. With nesterov=True
                        the update adds the newest gradient once more; the prediction does not.
        Adam, AdamW     (m / (1 - beta1^t)) / (sqrt(v) / sqrt(1 - beta2^t) + eps), t the updates made so far; with
                        amsgrad v is the largest so far. The decay of AdamW is left out, that of Adam is part of m.

    Under maximize=True torch keeps m and the buffer of the negated gradient, so the signs hold. Before the first
    update there is no direction.

    Those that stay what they are are left out: a version of the weights may share them. Asked right after the update
    that made a version (and after the scheduler, for the lr of the next), it is the prediction for that version,
    whatever is updated before its forwards run.
    """
    found = (
        (parameter, _ahead(parameter, optimizer, group, updates))
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    return {parameter: ahead for parameter, ahead in found if ahead is not None}


def check_predictable(optimizer: Optimizer) -> None:
    """Raises if the optimizer keeps no direction that can be told, so that a user hears of it before the first step.

    SGD without momentum is refused: its only direction is the last gradient, which SpecTrain smooths for a reason, and
    torch does not keep it; a prediction of no movement would be no correction under the name of one.
    """
    for number, group in enumerate(optimizer.param_groups):
        _check(optimizer, group, number)


def lr_by_delay(delay: int, update: int, annealed_over: int) -> float:
    """The factor for a stage's learning rate at an update (counted from 0): 1 / delay^e, with
    e = 1 - min(update / annealed_over, 1).

    The first part of PipeMare (Yang, Zhang, Li, Re, Aberger and De Sa, arXiv 1910.05124, learning rate rescheduling):
    a step in proportion to 1 / delay stays stable whatever the delay, which matters most early; later the stage has
    the learning rate that it would have without delay. A delay of 0 or 1 needs no factor.
    """
    if annealed_over < 1:
        raise ConfigError(f"lr_by_delay is {annealed_over}, but it must be a number of updates of at least 1")
    exponent = 1.0 - min(update / annealed_over, 1.0)
    factor: float = 1.0 / max(delay, 1) ** exponent
    return factor


@contextmanager
def scaled_lr(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """The learning rates of all groups are `factor` times as large inside. After it each group has the very object that
    it had before, so a scheduler never meets a scaled rate: step the scheduler outside.
    """
    kept = [group["lr"] for group in optimizer.param_groups]
    try:
        for group, lr in zip(optimizer.param_groups, kept, strict=True):
            group["lr"] = lr * factor
        yield
    finally:
        for group, lr in zip(optimizer.param_groups, kept, strict=False):
            group["lr"] = lr


@torch.no_grad()
def _ahead(parameter: Tensor, optimizer: Optimizer, group: dict[str, Any], updates: int) -> Tensor | None:
    """The prediction, or None if the parameter stays what it is."""
    _check(optimizer, group)
    state = optimizer.state.get(parameter)  # [parameter] would add an empty one, and `state` has a life of its own
    if not state or not updates:
        return None
    direction = state.get("momentum_buffer") if isinstance(optimizer, SGD) else _adam(state, group)
    if direction is None:
        return None
    # A learning rate on a GPU is not read here: that would wait for the GPU.
    lr = group["lr"].reshape(()) if isinstance(group["lr"], Tensor) else group["lr"]
    return (parameter - (updates * lr) * direction).to(parameter.dtype)


def _adam(state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    step = state["step"]
    if step.device.type == "cpu":  # it is on the GPU if capturable or fused
        step = step.item()
    beta1, beta2 = group["betas"]
    first = state["exp_avg"]
    second = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    if first.is_complex():  # torch keeps v of the real and of the imaginary part, as if they were two parameters
        first, second = torch.view_as_real(first), torch.view_as_real(second)
    scale = second.sqrt() / (1 - beta2**step) ** 0.5 + group["eps"]
    direction = first / (1 - beta1**step) / scale
    return torch.view_as_complex(direction) if state["exp_avg"].is_complex() else direction


def _check(optimizer: Optimizer, group: dict[str, Any], number: int = 0) -> None:
    name, way_out = type(optimizer).__name__, "or leave the correction out"
    if isinstance(optimizer, SGD):
        if group["momentum"] == 0:
            raise ConfigError(
                f"correction='spectrain' predicts weights from the optimizer's momentum, but {name} has momentum=0 in "
                f"group {number}: pass momentum=0.9 or so, {way_out}"
            )
    elif not isinstance(optimizer, Adam | AdamW):
        raise ConfigError(
            f"correction='spectrain' knows the momentum of SGD, Adam and AdamW, but the optimizer is {name}: take one "
            f"of these, {way_out}"
        )
