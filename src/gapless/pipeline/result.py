"""What a step leaves."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from gapless.errors import GaplessError
from gapless.schedule.timeline import Timeline
from gapless.stage.batch.plain import sum_in_order


@dataclass(frozen=True)
class Result:
    """What a step returns. All tensors are detached.

    loss      of the minibatch: the losses times their weights, added in order; None without a target. If a minibatch
              is spread over several steps, their losses add up to the minibatch's
    losses    of the microbatches, in order and not weighted
    weights   of the microbatches: their shares of the minibatch
    counted   what the loss is a mean over: samples, or the targets that count; with replicas, this one's. None for a
              loss that is a sum
    outputs   of the minibatch, concatenated; None unless requested, and under a mesh on ranks without the last stage.
              Values without a row per sample that differ between microbatches are a list; the loss of a model that
              returns its own is `loss`
    timeline  as measured; None unless requested
    """

    losses: tuple[Tensor, ...]
    weights: tuple[float, ...]
    outputs: Any = None
    timeline: Timeline | None = None
    counted: float | None = None

    def __repr__(self) -> str:
        """What people look for first; the outputs may be large."""
        shown = [f"loss={'None' if self.loss is None else f'{self.loss.item():.6g}'}"]
        shown += [f"microbatches={len(self.losses)}"] if self.losses else []
        shown += [] if self.counted is None else [f"counted={self.counted:g}"]
        shown += [f"{name}=..." for name in ("outputs", "timeline") if getattr(self, name) is not None]
        return f"Result({', '.join(shown)})"

    @cached_property
    def loss(self) -> Tensor | None:
        if not self.losses:
            return None
        loss: Any = sum_in_order(self.losses, self.weights)
        loss.backward = _told  # not part of what is saved or copied of it
        loss.__getstate__ = dict
        return loss  # type: ignore[no-any-return]


def _told(*_: Any, **__: Any) -> None:
    raise GaplessError(
        "there is nothing to go back through: step has computed the gradients already, and evaluate computes none; "
        "leave out loss.backward()"
    )
