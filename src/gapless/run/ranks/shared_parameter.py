"""The processes that hold a copy of one shared parameter: an embedding at one end, the head that uses it at the other.

exact     carried sums go from stage to stage with the backward of each microbatch
summed    sums go to the home when the step is over
both      then the home hands its gradient to all others, so that every optimizer sees the same
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gapless.model.uses import Uses
from gapless.run.ranks.wire.connections import Connections
from gapless.stage.shared.tie import Sums


class Holders:
    """One shared parameter, as seen from this process. `devices` has that of each stage."""

    def __init__(
        self, links: Connections, number: int, devices: Sequence[int], stages: Sequence[int], torch_device: torch.device
    ) -> None:
        self._links, self._torch_device = links, torch_device
        self._sums, self._totals = f"tied {number}", f"total {number}"
        self._devices = devices
        self._home = devices[min(stages)]
        self._others = sorted({devices[stage] for stage in stages} - {self._home})
        self._early: dict[tuple[int, int], Sums] = {}

    def is_here(self, stage: int) -> bool:
        return self._devices[stage] == self._links.device

    def hand(self, stage: int, microbatch: int, sums: Sums) -> None:
        self._links.outgoing(self._devices[stage], self._sums).hand([torch.tensor(microbatch), *sums])

    def take(self, stage: int, microbatch: int) -> Sums:
        source = self._devices[stage]
        while (source, microbatch) not in self._early:
            number, high, low = self._links.incoming(source, self._sums).get()
            self._early[source, int(number)] = Sums(high, low)
        return Sums(*(None if each is None else self._near(each) for each in self._early.pop((source, microbatch))))

    def _near(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._torch_device, non_blocking=True)

    def share(self, value: Tensor | None) -> Tensor | None:
        """The home's value, everywhere. What is sent is copied at once: its owner may change it next."""
        if self._links.device != self._home:
            received: Tensor | None = self._links.incoming(self._home, self._totals).get()[0]
            return received
        for device in self._others:
            outgoing = self._links.outgoing(device, self._totals)
            outgoing.send(outgoing.packed([value]))
        return value

    def share_value(self, parameter: nn.Parameter) -> None:
        """Every copy starts as the home's."""
        with torch.no_grad():
            value = self.share(parameter.detach())
            if value is not None and self._links.device != self._home:
                parameter.copy_(value)

    def share_grad(self, parameter: nn.Parameter) -> None:
        grad = self.share(parameter.grad)
        if self._links.device == self._home:
            return
        if grad is None or parameter.grad is None:
            parameter.grad = None if grad is None else torch.empty_like(parameter, dtype=grad.dtype).copy_(grad)
        else:
            parameter.grad.copy_(grad)


Away = Callable[[int, Sequence[int]], Holders | None]


def shared(
    links: Connections, uses: Uses, devices: Sequence[int], torch_device: torch.device
) -> tuple[list[tuple[nn.Parameter, Holders]], Away]:
    """Parameters that stages of several devices use, and what finds the holders of one by its number among those that
    several stages use: they are in the list once they were asked for.
    """
    several = [parameter for parameter, stages in uses.items() if len(stages) > 1]
    made: list[tuple[nn.Parameter, Holders]] = []

    def away(number: int, stages: Sequence[int]) -> Holders | None:
        if len({devices[stage] for stage in stages}) == 1:
            return None
        holders = Holders(links, number, devices, stages, torch_device)
        made.append((several[number], holders))
        return holders

    return made, away


def copies(
    links: Connections, own: Sequence[nn.Parameter], home: int, torch_device: torch.device, first: int
) -> list[tuple[nn.Parameter, Holders]]:
    """Weights of the loss itself, which every rank has: each gets their gradients, so that every optimizer keeps its
    copy as that of the last stage is, on the device `home`. Their numbers begin with `first`.
    """
    devices = [home, *(each for each in range(len(links.ranks)) if each != home)]
    made = [Holders(links, first + number, devices, range(len(devices)), torch_device) for number in range(len(own))]
    return list(zip(own, made, strict=True))
