"""How much is in a batch: samples and tokens."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gapless.stage.batch import microbatch as mb
from gapless.train.data.feed import Batch


def size_of(batches: Any, batch: Batch) -> int:
    """Of all replicas, if the data tells. A loader of the user's may have something else under that name."""
    told = getattr(batches, "samples", 0)
    return told if type(told) is int and told > 0 else mb.batch_size(batch[0])


def counts_of(batches: Sequence[Batch], sizes: Sequence[int]) -> tuple[int, int | None]:
    """Samples, and tokens where the inputs are token numbers."""
    tokens = 0
    for (inputs, _), size in zip(batches, sizes, strict=True):
        ids = inputs.get("input_ids") if isinstance(inputs, dict) else inputs
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
            return sum(sizes), None
        tokens += size * ids.size(1)
    return sum(sizes), tokens
