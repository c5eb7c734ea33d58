"""A step as a part of a larger minibatch: gradients of several steps add up, each with its share of the whole.

    step 0   weight 1/2   microbatch m:  loss * (1/2 * n_m / n)      stays on each replica (sync=False)
    step 1   weight 1/2   microbatch m:  loss * (1/2 * n_m / n)      the replicas add up what both steps have left

A share is one product and one division, and it scales the loss: that is what the plain loop over all microbatches does.
"""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from torch import Tensor

from gapless.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Share:
    """What a step is of its minibatch: all, unless `weight` says otherwise. `sync`: it is the last of several."""

    weight: float | Fraction = 1.0
    sync: bool = True

    @classmethod
    def of(cls, weight: Any, sync: Any) -> "Share":
        """As a user gives it."""
        if isinstance(weight, Tensor) and weight.numel() == 1:
            weight = weight.item()
        is_number = isinstance(weight, int | float | Fraction) and not isinstance(weight, bool)
        if not is_number or not math.isfinite(weight) or weight < 0:
            raise ConfigError(
                f"weight is {weight!r:.40}, but it must be a number of at least 0: this step's share of the "
                "minibatch, as 1 / 4 for one of 4 equal steps"
            )
        if not isinstance(sync, bool):
            raise ConfigError(f"sync is {sync!r:.40}, but it must be True or False")
        return cls(weight, sync)

    def shares(self, numbers: Sequence[float], total: float, *, summed: bool) -> list[float]:
        """What the loss of each microbatch is multiplied by. `numbers` is what each counts of `total`, which may have
        more than these; with `summed` losses are sums, and only the weight counts.
        """
        if summed:
            return [float(self.weight)] * len(numbers)
        return [float(self.weight * whole(number) / whole(total)) if total else 0.0 for number in numbers]


def whole(number: float) -> float:
    """Counts as whole numbers, so that their share of a fraction is exact before it is rounded."""
    return int(number) if float(number).is_integer() else number
