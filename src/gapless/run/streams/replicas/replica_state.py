"""What of a model goes from replica to replica: weights, buffers and, for local steps, the state of an optimizer; and
the mean of several.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

State = dict[str, Any]  # weights: a list, None for what stays; buffers: by name; optimizer: for each parameter, by name


def state_of(module: nn.Module, *, trained_only: bool = True, copied: bool = True) -> State:
    """Copies, on the CPU, unless they are looked at at once."""
    weights = [each if each.requires_grad or not trained_only else None for each in module.parameters()]
    buffers = buffers_of(module, copied=copied)
    return {"weights": [_copy(each) for each in weights] if copied else weights, "buffers": buffers}


def buffers_of(module: nn.Module, *, copied: bool = True) -> State:
    """The same of these alone."""
    owned = ((path, *each) for path, part in module.named_modules() for each in part._buffers.items())
    return {f"{path}.{name}".removeprefix("."): _copy(value) if copied else value for path, name, value in owned}


def put_state(module: nn.Module, state: State) -> None:
    """What `state_of` gave."""
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), state["weights"], strict=True):
            if value is not None:
                parameter.copy_(value)
        put_buffers(module, state["buffers"])


def put_buffers(module: nn.Module, buffers: State) -> None:
    """A forward may have changed them, or put others in their place."""
    modules = dict(module.named_modules())
    for name, value in buffers.items():
        prefix, _, own = name.rpartition(".")
        home = modules[prefix]._buffers
        there = home.get(own)
        if value is None or there is None or there.shape != value.shape or there.dtype != value.dtype:
            place = None if value is None else value.device if there is None else there.device
            home[own] = None if value is None else value.detach().to(place, copy=True)
        else:
            there.copy_(value)


def copy_state(source: nn.Module, target: nn.Module, *, trained_only: bool = False) -> None:
    """Parameters (those alone that are trained, if asked) and buffers of one copy into another."""
    pairs = zip(source.parameters(), target.parameters(), strict=True)
    chosen = [pair for pair in pairs if not trained_only or pair[0].requires_grad]
    with torch.no_grad():
        if chosen:
            torch._foreach_copy_([pair[1] for pair in chosen], [pair[0] for pair in chosen])
        put_buffers(target, buffers_of(source, copied=False))


def optimizer_state_of(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """All that has a mean: not the count of steps."""
    return [
        {
            name: value.detach()
            for name, value in optimizer.state.get(each, {}).items()
            if name != "step" and isinstance(value, Tensor) and value.is_floating_point()
        }
        for each in parameters
    ]


def put_optimizer_state(own: Sequence[State], values: Sequence[State]) -> None:
    """Into what `optimizer_state_of` gave."""
    for mine, given in zip(own, values, strict=True):
        for name, value in given.items():
            mine[name].copy_(value)


@torch.no_grad()
def averaged(states: Sequence[State]) -> State:
    """The mean of what several replicas have, in this order."""
    weights = [
        None if each[0] is None else _mean(each) for each in zip(*(state["weights"] for state in states), strict=True)
    ]
    buffers = {name: _mean_buffer([state["buffers"].get(name) for state in states]) for name in states[0]["buffers"]}
    optimizers = [
        {name: _mean([each[name] for each in same]) for name in same[0] if all(name in each for each in same)}
        for same in zip(*(state["optimizer"] for state in states), strict=True)
    ]
    return {"weights": weights, "buffers": buffers, "optimizer": optimizers}


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    """Added up in this order."""
    total = tensors[0].clone()
    for each in tensors[1:]:
        total.add_(each)
    return total.div_(len(tensors))


def _mean_buffer(buffers: Sequence[Tensor | None]) -> Tensor | None:
    """The first, where they have no mean."""
    there = [each for each in buffers if each is not None and each.is_floating_point()]
    if len(there) == len(buffers) and len({each.shape for each in there}) == 1:
        return _mean(there)
    return None if buffers[0] is None else buffers[0].clone()


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to("cpu", copy=True)
