"""Every rank learns all losses: those of its own pipeline from the rank that has the last stage, those of the other
replicas from its peers there.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gapless.model.uses import own_parameters
from gapless.run.given_batch import Batch
from gapless.run.program import Program
from gapless.run.ranks.mesh_position import MeshPosition
from gapless.run.ranks.replicas import Shares, gathered
from gapless.schedule.action import Action
from gapless.schedule.asynchronous.verdicts import losses_at

_KIND = "loss"  # of the channels they go through


class Losses:
    """As seen from one rank; `replicas` is its group of these."""

    def __init__(self, position: MeshPosition, links: Any, replicas: Any) -> None:
        self._position, self._links, self._replicas = position, links, replicas
        self._buffers: list[Tensor] = []  # of the loss itself, which are the same on all ranks
        self._versions: list[int] = []

    def adopt(self, loss: Any, module: nn.Module) -> list[nn.Parameter]:
        """What it has of its own. These weights learn."""
        self._buffers = list(loss.buffers()) if isinstance(loss, nn.Module) else []
        self._versions = [each._version for each in self._buffers]
        return [each for each in own_parameters(loss, module) if each.requires_grad]

    def after(self, row: Iterable[Action], last_stage: int) -> dict[Action, Callable[[Batch], None]]:
        """The losses go to all ranks after the last of these actions that makes one, and will not make it again."""
        made = losses_at(row, last_stage)
        return {} if made is None else {made: lambda batch: self.send(batch.losses)}

    def send(self, losses: Sequence[Tensor]) -> None:
        """To all other devices, if they are this one's."""
        together: list[Any] = [torch.stack(list(losses)) if len(losses) else None, *self._changed()]
        for device in range(self._position.num_devices):
            if device != self._position.device:
                self._links.outgoing(device, _KIND).hand(together)

    def _changed(self) -> list[tuple[int, Tensor]]:
        """Buffers of the loss that its forwards have moved since the last time."""
        versions = [each._version for each in self._buffers]
        changed = [number for number, version in enumerate(versions) if version != self._versions[number]]
        self._versions = versions
        return [(number, self._buffers[number].clone()) for number in changed]

    def everywhere(self, program: Program, weights: Sequence[float]) -> tuple[tuple[Tensor, ...], Sequence[float]]:
        """Those of all microbatches, of all replicas, and their weights."""
        position, schedule, losses = self._position, program.schedule, program.losses
        owner = schedule.placement.device(schedule.num_stages - 1, 0)
        if owner != position.device:
            together, *changed = self._links.incoming(owner, _KIND).get()
            losses = together.to(position.torch_device).unbind() if together is not None else ()
            with torch.no_grad():
                for number, value in changed:
                    self._buffers[number].copy_(value)
        elif program.inference:
            self.send(losses)
        if isinstance(weights, Shares):
            rows = weights.everywhere()  # which says whether all replicas are in the same call
            if losses:
                losses = gathered(self._replicas, losses, [len(row) for row in rows], position.torch_device)
                weights = [weight for row in rows for weight in row]
        return losses, weights
