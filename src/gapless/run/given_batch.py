"""What the devices of a step share: its batch, and what comes of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class Batch:
    """What one step works on and what it leaves: filled by the caller, read and written by the devices."""

    step: int = 0
    inputs: Sequence[Any] = ()
    targets: Sequence[Any] = ()
    weights: Sequence[float | Tensor] = ()
    weights_after_overflow: Sequence[float | Tensor] = ()  # if the update before, whose verdict is to come, has one
    want_outputs: bool = False
    outputs: list[Any] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)
