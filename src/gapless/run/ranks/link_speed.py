"""What it takes from each device to the next, measured through the very channels that a pipeline uses.

device d       activation ->               one hop at a time: small messages for the latency, large ones for the
device d + 1               <- gradient     bandwidth; half of what it takes there and back
"""

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from gapless.run.ranks.clock import host_number
from gapless.run.ranks.wire.connections import Connections

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
    rows = [torch.empty_like(mine) for _ in range(count)]
    if count > 1:
        group.allgather([rows], [mine]).wait()
    found = [row.tolist() for row in rows]
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
