"""Gradients as a whole: their norm, with bits that do not depend on how the model was cut."""

from collections.abc import Sequence

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
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.device))
    return total
