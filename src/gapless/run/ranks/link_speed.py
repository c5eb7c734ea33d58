"""All ranks of a mesh as one pipeline, for a plan that is made where it will run: what a hop takes is measured, and the
first rank tells the others what it has planned.

What it takes from each device to the next is measured through the very channels that a pipeline uses:

device d       activation ->               one hop at a time: small messages for the latency, large ones for the
device d + 1               <- gradient     bandwidth; half of what it takes there and back
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from gapless.run.ranks.many_processes import ManyProcesses
from gapless.run.ranks.mesh_position import as_one_pipeline
from gapless.run.ranks.timing import host_number
from gapless.run.ranks.wire.connections import Connections
from gapless.run.ranks.wire.groups import of_each
from gapless.run.world import Carriage

_SMALL, _MOST = 1 << 10, 32 << 20  # bytes
_LONG = 0.05  # seconds there and back that tell enough of a bandwidth
_SETTLED = 33  # messages after which receives that are posted ahead have the size of the last ones


class Hop(NamedTuple):
    """From a device to the next, or back."""

    latency: float  # seconds
    bandwidth: float  # bytes a second
    near: bool  # both are on one host


def measure_hops(links: Connections, group: Any, device: torch.device) -> list[Hop]:
    """Of all devices, in order. Every rank of the group calls it, and all get the same."""
    count = len(links.ranks)
    pairs = [(device, device + 1) for device in range(count - 1)]
    links.connect([(a, b, "activation") for a, b in pairs] + [(b, a, "gradient") for a, b in pairs])
    shared = [carrier for carrier in links.carriers if carrier.shares_memory]
    near = any(carrier.reaches(links.device + 1, "activation") for carrier in shared)
    mine = torch.tensor([0.0, 0.0, host_number(), float(near)], dtype=torch.float64)
    for first in range(count - 1):
        if links.device == first:
            mine[:2] = torch.tensor(_asked(links, first + 1, device), dtype=torch.float64)
        elif links.device == first + 1:
            _answer(links, first, device)
        group.barrier().wait()  # or two hops would share a wire
    found = [row.tolist() for row in of_each(group, mine)]
    return [
        # Processes that share no memory are not on one host, whatever their kernel.
        Hop(latency, bandwidth, bool(near) if shared else host == after[2])
        for (latency, bandwidth, host, near), after in pairwise(found)
    ]


def _asked(links: Connections, target: int, device: torch.device) -> tuple[float, float]:
    """Latency and bandwidth to the next device, which answers."""
    send, receive = links.outgoing(target, "activation").hand, links.incoming(target, "gradient").get

    def there_and_back(size: int, rounds: int, before: int) -> list[float]:
        ball = [torch.empty(size, dtype=torch.uint8, device=device)]
        taken = []
        for _ in range(before + rounds):
            begin = time.perf_counter()
            send(ball)
            _arrived(receive(), device)
            taken.append(time.perf_counter() - begin)
        return taken[before:]

    first = statistics.median(there_and_back(_SMALL, 50, 3))
    size = 8 * _SMALL
    while size < _MOST and min(there_and_back(size, 3, 1)) < first + _LONG:  # the quickest: a hitch tells nothing
        size *= 8
    large = statistics.median(there_and_back(size, 9, _SETTLED))
    lower, small, upper = statistics.quantiles(there_and_back(_SMALL, 50, _SETTLED))
    send([torch.empty(0, dtype=torch.uint8, device=device)])
    small = min(first, small)
    took = max(large - small, upper - lower) / 2  # what is less than small messages differ by can't be told
    return small / 2, (size - _SMALL) / took


def _answer(links: Connections, source: int, device: torch.device) -> None:
    """Sends back whatever comes, until nothing does."""
    receive, send = links.incoming(source, "activation").get, links.outgoing(source, "gradient").hand
    while (came := _arrived(receive(), device))[0].numel():
        send(came)


def _arrived(tree: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    there = [tensor.to(device) for tensor in tree]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return there


class MeasuredLine(ManyProcesses):
    """This rank's place in the line."""

    def hops(self) -> list[Hop]:
        """From each device of this pipeline to the next: every rank has all of them."""
        with self._consistency.call("measuring its links"):
            return measure_hops(self.links, self.groups.pp, self.position.torch_device)

    def from_first(self, make: Callable[[], str]) -> str:
        """What the first device makes, on every rank."""
        with self._consistency.call("planning"):
            text: str = self.groups.everywhere("" if self.position.device else make())[0]
            return text


@contextmanager
def measured_line(mesh: Any, timeout: float) -> Iterator[MeasuredLine]:
    """Where one of the ranks fails, the others are told."""
    with closing(MeasuredLine(as_one_pipeline(mesh), timeout, None, Carriage())) as line, line.making():
        yield line
