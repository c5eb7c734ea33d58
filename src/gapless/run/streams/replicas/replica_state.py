"""What of a model goes from rank to rank: weights, buffers and, for local steps, the state of an optimizer."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gapless.run.streams.replicas.local_steps import mean, mean_buffer

State = dict[str, Any]  # weights: a list; buffers: by name; optimizer: for each parameter, by name


def state_of(module: nn.Module, *, trained_only: bool = True) -> State:
    """Copies, on the CPU."""
    weights = [_copy(each) for each in module.parameters() if each.requires_grad or not trained_only]
    return {"weights": weights, "buffers": buffers_of(module)}


def buffers_of(module: nn.Module) -> State:
    """Copies, on the CPU."""
    return {name: None if value is None else _copy(value) for name, _, _, value in _buffers(module)}


def put_state(module: nn.Module, state: State, *, trained_only: bool = True) -> None:
    """What `state_of` gave."""
    chosen = [each for each in module.parameters() if each.requires_grad or not trained_only]
    with torch.no_grad():
        for parameter, value in zip(chosen, state["weights"], strict=True):
            parameter.copy_(value)
        put_buffers(module, state["buffers"])


def put_buffers(module: nn.Module, buffers: State) -> None:
    """A forward may have put others in their place."""
    modules = dict(module.named_modules())
    for name, value in buffers.items():
        prefix, _, own = name.rpartition(".")
        home = modules[prefix]._buffers
        there = home.get(own)
        if value is None or there is None or there.shape != value.shape or there.dtype != value.dtype:
            home[own] = None if value is None else value.clone().to(value.device if there is None else there.device)
        else:
            there.copy_(value)


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


def averaged(states: Sequence[State]) -> State:
    """The mean of what several replicas have, in this order."""
    weights = [mean(each) for each in zip(*(state["weights"] for state in states), strict=True)]
    buffers = {name: mean_buffer([state["buffers"].get(name) for state in states]) for name in states[0]["buffers"]}
    optimizers = [
        {name: mean([each[name] for each in same]) for name in same[0] if all(name in each for each in same)}
        for same in zip(*(state["optimizer"] for state in states), strict=True)
    ]
    return {"weights": weights, "buffers": buffers, "optimizer": optimizers}


def named_state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters, and buffers that are saved: others are computed, and may hold anything."""
    kept = {
        name: value
        for name, home, own, value in _buffers(module)
        if value is not None and own not in home._non_persistent_buffers_set
    }
    return {**dict(module.named_parameters()), **kept}


def _buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor | None]]:
    for prefix, part in module.named_modules():
        for name, value in part._buffers.items():
            yield f"{prefix}.{name}" if prefix else name, part, name, value


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
