"""Groups of ranks that are gapless's own: made through the user's store, over one network device, and broken off when a
rank is gone.
"""

import contextlib
import ctypes
import os
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NEVER = 365 * 24 * 3600.0  # seconds
_NEVER_SENT = 1
_SOON = timedelta(milliseconds=1)
_PATIENCE = timedelta(milliseconds=250)
_A_MOMENT, _A_WHILE = 0.005, 1.0  # seconds


class Group:
    """A Gloo group. What was broken off raises wherever somebody waits in it."""

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo
        self.size, self.rank, self.send, self.recv = gloo.size, gloo.rank, gloo.send, gloo.recv
        self.is_broken = False
        self._under_way: list[Any] = []

    def allgather(self, *words: Any) -> "Together":
        return self._begun(self._gloo.allgather(*words))

    def allreduce(self, *words: Any) -> "Together":
        return self._begun(self._gloo.allreduce(*words))

    def broadcast(self, *words: Any) -> "Together":
        return self._begun(self._gloo.broadcast(*words))

    def barrier(self) -> "Together":
        return self._begun(self._gloo.barrier())

    def _begun(self, work: Any) -> "Together":
        self._under_way = [each for each in self._under_way if not each.is_completed()]
        self._under_way.append(work)
        return Together(self, work)

    def break_off(self) -> None:
        """Whoever waits in the group raises, here and at the peers: a receive that runs out of time closes all
        connections.
        """
        self.is_broken = True
        for peer in range(self.size()):
            if peer != self.rank():
                with contextlib.suppress(RuntimeError):
                    self.recv([torch.empty(1, dtype=torch.uint8)], peer, _NEVER_SENT).wait(_SOON)

    def close(self) -> None:
        """To be called before it is let go of, which waits for what is under way. In a broken group that may last for
        ever, so a thread of it is left to the end of the process then.
        """
        deadline = time.monotonic() + _A_WHILE
        while self.is_broken and not all(each.is_completed() for each in self._under_way):
            if time.monotonic() > deadline:
                keep_for_ever(self._gloo)
                break
            time.sleep(_A_MOMENT)


class Together:
    """What all ranks of a group do together. Gloo forgets some sends when connections close, and would wait for them
    for ever; here nobody does.
    """

    def __init__(self, group: Group, work: Any) -> None:
        self._group, self._work = group, work

    def wait(self) -> None:
        given_up = False
        while not self._work.is_completed():
            try:
                self._work.wait(_PATIENCE)
            except RuntimeError as error:  # which says no more than that it took too long
                if given_up and not self._work.is_completed():
                    raise RuntimeError(f"Connection closed: the group was broken off: {error}") from None
            given_up = self._group.is_broken
        self._work.wait()


def keep_for_ever(one: object) -> None:
    """Nothing that it refers to is destroyed before the process ends, and not even then."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def connected(name: str, ranks: Sequence[int], number: int, network: Any, timeout: float = NEVER) -> Group | None:
    """A group of these ranks, in which this one has that number. Nothing in it runs out of time unless asked for: ranks
    may compute for as long as they like, and one that is dead or silent is noticed by the watch.
    """
    if len(ranks) == 1:
        return None
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [network]
    options._timeout = timedelta(seconds=timeout)
    options._threads = 1
    return Group(gloo(part_of_store(name, ranks), number, len(ranks), options))


def of_each(group: Any, own: Tensor) -> list[Tensor]:
    """What each rank of a group has, all of one shape; of one rank, where there is no group. All of them call it."""
    if group is None:
        return [own]
    own = own.contiguous()
    rows = [torch.empty_like(own) for _ in range(group.size())]
    if own.numel():
        group.allgather([rows], [own]).wait()
    return rows


def bytes_of_each(group: Any, own: bytes) -> list[bytes]:
    """The same for bytes, of which each may have another number."""
    sizes = [int(each) for each in of_each(group, torch.tensor(len(own)))]
    rows = of_each(group, torch.frombuffer(bytearray(own.ljust(max(sizes))), dtype=torch.uint8))
    return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]


_network_devices: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def network_device() -> Any:
    """The interface that torch's own Gloo groups would take: a port, and a thread that wakes up a hundred times a
    second, so pipelines share it. Who asks for it keeps it.
    """
    name = next((name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name), "")
    device = _network_devices.get(name)
    if device is None:
        gloo = dist.ProcessGroupGloo
        device = gloo.create_device(interface=name) if name else gloo.create_default_device()
        _network_devices[name] = device
    return device


def part_of_store(use: str, ranks: Sequence[int]) -> Any:
    """A part of the store that no earlier pipeline has used: its ranks make theirs in the same order, so they count
    alike.
    """
    store = dist.distributed_c10d._get_default_store()
    name = f"{use}/{'-'.join(map(str, ranks))}"
    times = store.add(f"gapless/{name}/{dist.get_rank()}", 1)
    return dist.distributed_c10d.PrefixStore(f"gapless/{name}/{times}", store)
