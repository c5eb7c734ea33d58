"""Copies of tensors, laid out as those are: kernels are chosen by that, and so are the last bits."""

import itertools
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
    made = {key: _by_region(some) for key, some in regions.items()}
    found = [
        made[each.untyped_storage()._cdata][_region(each)].detach() if _is_plain(each) else each.detach().clone()
        for each in tensors
    ]
    for copied, each in zip(found, tensors, strict=True):
        copied.requires_grad_(each.requires_grad)
    inputs, target = mb.unflatten(found, shape)
    return inputs, target


def _by_region(views: dict[Any, Tensor]) -> dict[Any, Tensor]:
    """Copies of views of one memory, which may be a whole data set's: only what lies among them is copied together."""
    pieces: list[list[Any]] = []
    end = 0
    for region in sorted(views, key=lambda region: _span(views[region])):
        start, its_end = _span(views[region])
        if start >= end:
            pieces.append([])
        pieces[-1].append(region)
        end = max(end, its_end)
    made = [together([views[region] for region in piece]) for piece in pieces]
    return dict(zip(itertools.chain(*pieces), itertools.chain(*made), strict=True))


def _span(tensor: Tensor) -> tuple[int, int]:
    """Its first byte in its memory, and the one behind its last."""
    spanned = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + spanned * tensor.element_size()


def together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Several tensors of one memory, copied as one piece of it."""
    if len(tensors) == 1:
        return copies(tensors)
    starts, ends = zip(*map(_span, tensors), strict=True)
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
