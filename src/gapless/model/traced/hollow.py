"""A model without memory, for as long as it is traced: a trace looks at shapes, types and devices alone.

So a model is traced for a device on which it does not fit, and one on the meta device, of which most belongs to other
processes, gives the graph of a real one.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gapless.model.materialise import like


@contextlib.contextmanager
def hollow(model: nn.Module, device: torch.device) -> Iterator[None]:
    """While it holds, the parameters and buffers of the model are others, on this device and without memory."""
    made: dict[int, Tensor] = {}
    before = [
        (held, name, tensor)
        for module in model.modules()
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None and type(tensor) in (Tensor, nn.Parameter)
    ]
    for _, _, tensor in before:
        if id(tensor) not in made:
            made[id(tensor)] = _without_memory(tensor, device)
    try:
        for held, name, tensor in before:
            held[name] = made[id(tensor)]  # type: ignore[assignment]
        yield
    finally:
        for held, name, tensor in before:
            held[name] = tensor  # type: ignore[assignment]


def _without_memory(tensor: Tensor, device: torch.device) -> Tensor:
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if type(made) is Tensor:  # and no fake one, which has none
        made.untyped_storage().resize_(0)
    return like(tensor, made)
