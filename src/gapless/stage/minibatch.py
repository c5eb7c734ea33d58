"""What a caller gives to a step or an evaluation, cut into microbatches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import microbatch as mb


@dataclass(frozen=True)
class Minibatch:
    """The inputs and targets of the microbatches, and their sizes; a rank that has no use for some has None there."""

    inputs: Any
    target: Any
    parts: Sequence[Any]
    targets: Sequence[Any]
    sizes: Sequence[int]

    @classmethod
    def cut(
        cls, inputs: Any, target: Any, microbatches: int, batch_dims: Any, target_dims: Any, *, needed: bool = True
    ) -> "Minibatch":
        """`needed`: this process uses the inputs, whatever is in them."""
        size = mb.batch_size(inputs, batch_dims)
        count = min(size, microbatches)
        parts: list[Any] = [None] * count
        if needed or size == 0 or target is None:
            parts = mb.split(inputs, microbatches, batch_dims)
        targets: list[Any] = [None] * count
        if target is not None:
            targets = mb.split(target, count, target_dims, size=size)
        return cls(inputs, target, parts, targets, mb.sizes(size, count))


def apart(part: Any) -> Any:
    """Microbatches are views of one tensor and share its version counter: a layer that changes its input in place
    would make torch believe that those of all other microbatches have changed.
    """
    if part is None:
        return None
    tensors, shape = mb.flatten(part)
    return mb.unflatten([tensor.data.requires_grad_(tensor.requires_grad) for tensor in tensors], shape)
