"""Gradients as a whole: their norm, with bits that do not depend on how the model was cut."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def clip_grad_norm(parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """The norm of each gradient, in the order of the parameters, then the norm of these; gradients are scaled to
    `max_norm`.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    device = grads[0].device
    norms = [torch.linalg.vector_norm(grad, norm_type).to(device) for grad in grads]
    return _scale(grads, torch.stack(norms), max_norm, norm_type)


def clip_everywhere(
    parameters: Sequence[nn.Parameter],
    mine: set[nn.Parameter],
    counted: set[nn.Parameter],
    group: Any,
    max_norm: float,
    norm_type: float = 2.0,
) -> Tensor:
    """The same for a model in parts: `parameters` are all of them, `mine` those that are here, and the norms of those
    `counted` nobody else adds.
    """
    norms = torch.zeros(2, len(parameters), dtype=torch.float64)
    for number, parameter in enumerate(parameters):
        if parameter in counted and parameter.grad is not None:
            norms[0, number] = unsharded(torch.linalg.vector_norm(parameter.grad, norm_type)).double().cpu()
            norms[1, number] = 1
    if group is not None:
        group.allreduce([norms]).wait()
    there = norms[1] > 0
    if not there.any():
        return torch.tensor(0.0)
    first = parameters[int(there.nonzero()[0])]
    grads = [parameter.grad for parameter in parameters if parameter in mine and parameter.grad is not None]
    device = grads[0].device if grads else torch.device("cpu")
    return _scale(grads, norms[0, there].to(first.dtype).to(device), max_norm, norm_type)


def _scale(grads: Sequence[Tensor], norms: Tensor, max_norm: float, norm_type: float) -> Tensor:
    total: Tensor = torch.linalg.vector_norm(norms, norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        local(grad).mul_(scale.to(grad.device))
    return total


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def unsharded(value: Tensor) -> Tensor:
    """All of a DTensor."""
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole
