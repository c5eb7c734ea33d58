"""Copies of tensors, laid out as those are: kernels are chosen by that, and so are the last bits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import microbatch as mb


def own(inputs: Any, target: Any) -> tuple[Any, Any]:
    """A batch as it is now: when it is used, a loader with one buffer may have overwritten it. What shares memory still
    does: a layer that changes its input in place may change the target too.
    """
    tensors, shape = mb.flatten([mb.as_dict(inputs), mb.as_dict(target)])
    regions: dict[int, dict[Any, Tensor]] = {}  # by storage
    for each in filter(_is_plain, tensors):
        regions.setdefault(each.untyped_storage()._cdata, {}).setdefault(_region(each), each.detach())
    made = {key: dict(zip(some, together([*some.values()]), strict=True)) for key, some in regions.items()}
    found = [
        made[each.untyped_storage()._cdata][_region(each)].detach() if _is_plain(each) else each.detach().clone()
        for each in tensors
    ]
    for copied, each in zip(found, tensors, strict=True):
        copied.requires_grad_(each.requires_grad)
    inputs, target = mb.unflatten(found, shape)
    return inputs, target


def together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Several tensors of one memory, copied as one piece of it."""
    if len(tensors) == 1:
        return copies(tensors)
    starts = [each.storage_offset() * each.element_size() for each in tensors]
    spans = [sum((n - 1) * s for n, s in zip(each.shape, each.stride(), strict=True)) + 1 for each in tensors]
    ends = [start + span * each.element_size() for start, span, each in zip(starts, spans, tensors, strict=True)]
    first = min(starts) // 16 * 16
    memory = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
    piece = memory.set_(tensors[0].untyped_storage(), first, (max(ends) - first,), (1,)).clone().untyped_storage()
    return [
        torch.empty(0, dtype=each.dtype, device=each.device).set_(
            piece, (start - first) // each.element_size(), each.shape, each.stride()
        )
        for start, each in zip(starts, tensors, strict=True)
    ]


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
    strided = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested
    return strided and tensor.numel() > 0 and not tensor.is_conj() and not tensor.is_neg()


def _region(tensor: Tensor) -> Any:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
