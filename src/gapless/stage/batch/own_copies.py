"""Copies of tensors, laid out as those are: kernels are chosen by that, and so are the last bits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import microbatch as mb


def own(batch: Any) -> Any:
    """A batch as it is now: when it is used, a loader with one buffer may have overwritten it."""
    tensors, shape = mb.flatten(mb.as_dict(batch))
    made = [copies([each.detach()])[0] if _is_plain(each) else each.detach().clone() for each in tensors]
    for copied, each in zip(made, tensors, strict=True):
        copied.requires_grad_(each.requires_grad)
    return mb.unflatten(made, shape)


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of all of them."""
    made = [made_like(each) for each in tensors]
    copy(made, tensors)
    return made


def made_like(tensor: Tensor) -> Tensor:
    """Laid out in the same way; one number that was spread is one here too."""
    once = _once(tensor)
    made = torch.empty_strided(once.shape, once.stride(), dtype=tensor.dtype, device=tensor.device)
    return made if once is tensor else made.expand(tensor.shape)


@torch.no_grad()
def copy(places: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """The values of these into others that are made like them."""
    if places:
        torch._foreach_copy_([_once(each) for each in places], [_once(each) for each in tensors])


def _once(tensor: Tensor) -> Tensor:
    """Without the dimensions along which it repeats itself."""
    if 0 in tensor.stride():
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested
