"""What a step leaves."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from gapless.schedule.timeline import Timeline
from gapless.stage.plain import sum_in_order


@dataclass(frozen=True)
class Result:
    """What a step leaves: all tensors are detached.

    loss      of the minibatch, 0-d: the losses times their weights, added in order; None without a target. Of a step
              that is a part of a minibatch its part: those of all its steps add up to the minibatch's
    losses    of the microbatches, in their order, without their weights
    weights   of the microbatches: their share of the minibatch
    counted   what the loss is a mean over: samples, or targets that it does not leave out; of replicas those of this
              one. None for a loss that is a sum
    outputs   of the minibatch, merged; None unless asked for
    timeline  as measured; None unless asked for
    """

    losses: tuple[Tensor, ...]
    weights: tuple[float, ...]
    outputs: Any = None
    timeline: Timeline | None = None
    counted: float | None = None

    @cached_property
    def loss(self) -> Tensor | None:
        return sum_in_order(self.losses, self.weights) if self.losses else None
