"""Fingerprints of tensors, by which two ranks see whether they have the same.

Of each tensor that is a weighed sum of some of its elements, and the sum of their sizes, by which the difference of two
is judged. Numbers that were computed alike on different processors may differ in their last bits, and are the same
here. Another sample in its place, or another seed, changes nearly all of them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gapless.errors import GaplessError
from gapless.guards.between_ranks import SAME_BATCHES
from gapless.stage.batch import microbatch as mb

_FIRST = 8  # calls in which batches are compared; then at each power of two, and
_OFTEN = 1024
_MOST = 16  # tensors of inputs, and of targets
_ELEMENTS = 1 << 12  # of a tensor, at the most
_SAME = 1e-6  # of the sizes
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
UNKNOWN = (0.0, -1.0)  # what is not here is not compared


def is_compared(call: int) -> bool:
    """Whether the batches of this call are."""
    return call < _FIRST or call & (call - 1) == 0 or call % _OFTEN == 0


def row_of(inputs: Any, target: Any, numbers: Sequence[float]) -> Tensor:
    """The fingerprints of a batch, and of what its microbatches count."""
    return torch.cat([_row(inputs), _row(target), fingerprints([torch.tensor(numbers, dtype=torch.float64)])])


def fault_of_batches(one: Tensor, other: Tensor, call: str, first: int, last: int) -> GaplessError | None:
    """If there is one: the rank with the first stage has batch `one`, that with the last stage the other."""
    unequal = differ(one, other)
    # All of the batch of one rank, or all of the other's, is a batch: augmented inputs, say, that only one uses.
    if not (bool(unequal[:_MOST].any()) and bool(unequal[_MOST:].any())):
        return None
    return SAME_BATCHES.refusal(
        f"the ranks got different batches in {call}: rank {first}, which has the first stage, takes its inputs from "
        f"one and rank {last}, which has the last, its targets from another"
    )


def _row(tree: Any) -> Tensor:
    """As many fingerprints for every tree, so that all ranks send alike."""
    tensors = [] if tree is None else mb.flatten(tree)[0][:_MOST]
    unknown = torch.tensor([UNKNOWN] * (_MOST - len(tensors)), dtype=torch.float64).view(-1, 2)
    return torch.cat([fingerprints(tensors), unknown])


def saved_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and buffers that are saved: others are computed, and may hold anything."""
    yield from module.named_parameters()
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}".removeprefix("."), buffer


def fingerprints(tensors: list[Tensor]) -> Tensor:
    """Two numbers for each, on the CPU. From a GPU all come in one copy."""
    made = [_fingerprint(tensor) for tensor in tensors]
    together = torch.empty(len(made), 2, dtype=torch.float64)
    for device in {each.device for each in made}:
        places = [place for place, each in enumerate(made) if each.device == device]
        together[places] = torch.stack([made[place] for place in places]).cpu()
    return together


def _fingerprint(tensor: Tensor) -> Tensor:
    is_plain = type(tensor) in _PLAIN and not tensor.is_meta and tensor.layout is torch.strided
    if not is_plain or tensor.is_quantized or tensor.is_nested:
        return torch.tensor(UNKNOWN, dtype=torch.float64)
    flat = tensor.detach()
    flat = torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat
    flat = flat.reshape(-1)
    step = max(1, flat.numel() // _ELEMENTS) | 1  # odd: not always the same column
    some = flat[::step][:_ELEMENTS].to(torch.float64).nan_to_num(0.0, 1.0, -1.0)
    weights = torch.arange(2, 2 + len(some), device=some.device, dtype=torch.float64).sqrt_().frac_().add_(0.5)
    # Not `some @ weights`, for which a GPU would keep 32 MiB.
    return torch.stack([(some * weights).sum() + flat.numel(), some.abs().sum() + flat.numel()])


def differ(one: Tensor, other: Tensor) -> Tensor:
    """For each tensor whether the two ranks have different ones."""
    known = (one[:, 1] >= 0) & (other[:, 1] >= 0)
    return known & ((one - other).abs().amax(1) > _SAME * (one[:, 1] + other[:, 1]))
