"""From the norms of all gradients: does a step stand, is it to be scaled, or to be left out?

The norm is torch's own, over the norms of single parameters in the model's order: sums of stages would have other bits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gapless.run.clip import factor_of, total_of
from gapless.stage.batch.plain import sum_in_order

_SURELY = 1.05  # by so much a part must exceed the limit, so that the whole does too, whatever is rounded


class Verdict(NamedTuple):
    """On one step. Where nothing is checked there is no norm."""

    total: Tensor | None = None  # the norm of all gradients
    factor: Tensor | None = None  # by which gradients are multiplied, if they are clipped
    skips: bool = False  # some are not finite, or the loss is not
    alone: bool = False  # the next step waits for its own verdict before anything else is done
    overflowed: bool = False  # scaled gradients are not finite

    @property
    def tensors(self) -> list[Tensor]:
        return [each for each in (self.total, self.factor) if each is not None]

    @property
    def stands(self) -> bool:
        """A step that was made with the gradients as they are is right."""
        return self.factor is None and not self.skips


class Findings(NamedTuple):
    """What devices tell beside norms: of all, whether any has it."""

    alone: bool  # some stage can't run forwards twice
    lost: bool  # the loss is not finite
    overflowed: bool  # scaled gradients are not finite


@dataclass(frozen=True)
class Check:
    """What is checked."""

    max_norm: float | None
    skip_nonfinite: bool

    def __bool__(self) -> bool:
        return self.max_norm is not None or self.skip_nonfinite

    def verdict(self, norms: list[Tensor], told: "Findings") -> Verdict:
        """From the norms of all parameters, in their order."""
        alone, lost, overflowed = told
        total = total_of([norm.to(norms[0].device) for norm in norms]) if self and norms else None
        if lost or overflowed or (total is not None and self.skip_nonfinite and not math.isfinite(total.item())):
            return Verdict(total, skips=True, alone=True, overflowed=overflowed)
        if total is None:
            return Verdict(alone=alone)
        factor = None if self.max_norm is None else factor_of(total, self.max_norm)
        if factor is not None and factor.item() == 1:
            factor = None
        return Verdict(total, factor, alone=alone or factor is not None)

    def loses(self, losses: Sequence[Tensor], weights: Sequence[float]) -> bool:
        """Whether the loss of a minibatch says that it is to be left out."""
        return self.skip_nonfinite and bool(losses) and not math.isfinite(sum_in_order(losses, weights).item())

    def fails(self, norms: Mapping[int, Tensor]) -> bool:
        """Whether these alone say that the step as it is will not stand."""
        if not self or not norms:
            return False
        own = torch.linalg.vector_norm(torch.stack([norm.real.double().cpu() for norm in norms.values()])).item()
        return not math.isfinite(own) or (self.max_norm is not None and own > _SURELY * self.max_norm)
