"""Every rank learns all losses: those of its own pipeline from the rank that has the last stage, those of the other
replicas from its peers there.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gapless.run.program import Program
from gapless.run.ranks.replicas import Shares, gathered
from gapless.run.ranks.seat import Seat

KIND = "loss"  # of the channels they go through


class Losses:
    """As seen from one rank; `replicas` is its group of these."""

    def __init__(self, seat: Seat, links: Any, replicas: Any) -> None:
        self._seat, self._links, self._replicas = seat, links, replicas

    def send(self, losses: Sequence[Tensor]) -> None:
        """To all other devices, if they are this one's."""
        together = [torch.stack(list(losses))] if len(losses) else []
        for device in range(self._seat.num_devices):
            if device != self._seat.device:
                self._links.outgoing(device, KIND).hand(together)

    def everywhere(self, program: Program, weights: Sequence[float]) -> tuple[tuple[Tensor, ...], Sequence[float]]:
        """Those of all microbatches, of all replicas, and their weights."""
        seat, schedule, losses = self._seat, program.schedule, program.losses
        owner = schedule.placement.device(schedule.num_stages - 1, 0)
        if owner != seat.device:
            together = self._links.incoming(owner, KIND).get()
            losses = together[0].to(seat.torch_device).unbind() if together else ()
        elif program.inference:
            self.send(losses)
        if isinstance(weights, Shares):
            rows = weights.everywhere()  # which says whether all replicas are in the same call
        if isinstance(weights, Shares) and losses:
            losses = gathered(self._replicas, losses, [len(row) for row in rows], seat.torch_device)
            weights = [weight for row in rows for weight in row]
        return losses, weights
