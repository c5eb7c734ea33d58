"""A wire between two network namespaces, with a delay and a rate, for kernels without netem.

    python -m tests.run.link NAMESPACE NAMESPACE INTERFACE SECONDS BYTES_PER_SECOND

Each namespace gets a TUN interface. A packet leaves when those before it have left and it has gone through, which takes
its size over the rate, and arrives the delay later. Says `ready`, and runs until it is killed.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MOST_BYTES = 1 << 24  # under way in one direction; what comes on top is lost
_LARGEST = 1 << 16


class Wire:
    """One direction."""

    def __init__(self, source: int, target: int, delay: float, rate: float) -> None:
        self.source, self._target, self._delay, self._rate = source, target, delay, rate
        self._free = 0.0  # when the last packet has gone through
        self._bytes = 0
        self._under_way: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        packet = os.read(self.source, _LARGEST)
        if self._bytes + len(packet) <= _MOST_BYTES:
            self._free = max(self._free, time.monotonic()) + len(packet) / self._rate
            self._bytes += len(packet)
            self._under_way.append((self._free + self._delay, packet))

    def deliver(self) -> float:
        """What has arrived; says how long it is to the next."""
        while self._under_way:
            left = self._under_way[0][0] - time.monotonic()
            if left > 0:
                return left
            _, packet = self._under_way.popleft()
            self._bytes -= len(packet)
            with contextlib.suppress(OSError):  # that end is not up yet
                os.write(self._target, packet)
        return 3600.0


def interface(namespace: str, name: str) -> int:
    """A TUN device in the namespace."""
    with open("/proc/self/ns/net") as home, open(f"/run/netns/{namespace}") as away:
        enter(away.fileno())
        end = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
        enter(home.fileno())
    return end


def enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "can't enter a network namespace")


def main() -> None:
    first, second, name, delay, rate = sys.argv[1:]
    ends = [interface(namespace, name) for namespace in (first, second)]
    wires = [Wire(ends[i], ends[1 - i], float(delay), float(rate)) for i in (0, 1)]
    print("ready", flush=True)
    while True:
        left = min(wire.deliver() for wire in wires)
        ready = select.select(ends, [], [], left)[0]
        for wire in wires:
            if wire.source in ready:
                wire.take()


if __name__ == "__main__":
    main()
