"""All ranks of a mesh as one pipeline, for a plan that is made where it will run: what a hop takes is measured, and the
first rank tells the others what it has planned.
"""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch

from gapless.run.ranks import seat
from gapless.run.ranks.link_speed import Hop, measure_hops
from gapless.run.ranks.losses import KIND
from gapless.run.ranks.many_processes import ManyProcesses
from gapless.run.world import Carriage


class OneLine(ManyProcesses):
    """This rank's place in the line."""

    def hops(self) -> list[Hop]:
        """From each device of this pipeline to the next: every rank has all of them."""
        with self._calls.call("measuring its links"):
            return measure_hops(self._links, self._groups.pp, self.seat.torch_device)

    def from_first(self, make: Callable[[], str]) -> str:
        """What the first device makes, on every rank."""
        with self._calls.call("planning"):
            if self.seat.device > 0:
                (came,) = self._links.incoming(0, KIND).get()
                return bytes(came.tolist()).decode()
            text = make()
            letters = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.seat.torch_device)
            for device in range(1, self.seat.num_devices):
                self._links.outgoing(device, KIND).hand([letters])
            return text


@contextmanager
def in_one_line(mesh: Any, timeout: float) -> Iterator[OneLine]:
    """Where one of the ranks fails, the others are told."""
    with closing(OneLine(seat.in_one_line(mesh), timeout, None, Carriage())) as line, line.making():
        yield line
