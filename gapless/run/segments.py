"""Memory that two processes of one host share: a large tensor is written once, and read where it is.

    sender     | flag | data ...          sets the flag, writes, and names the segment in its message
    receiver     the same memory          takes the flag down when the last tensor in it is gone

The memory has no name in any file system: whoever knows the process and its file descriptor can open it, and when the
processes end, whatever the reason, nothing is left behind. Which ranks can do so for each other is tried at the start;
between others everything goes through the network.
"""

import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gapless.run.layout import ALIGNMENT, padded

_NUMBER_BITS = 31
_MARK = 1 << 62  # in a header: the tensors are in a segment, of this number and file descriptor
_SIZE_OF_TOKEN = 16


class Segment:
    """Some shared memory on the side of its owner."""

    def __init__(self, number: int, capacity: int) -> None:
        self._descriptor = os.memfd_create("gapless", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, ALIGNMENT + capacity)
        self._map = mmap.mmap(self._descriptor, ALIGNMENT + capacity)
        self.capacity = capacity
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self.name = _MARK | number << _NUMBER_BITS | self._descriptor
        weakref.finalize(self, os.close, self._descriptor)

    @property
    def free(self) -> bool:
        return self._map[0] == 0

    def take(self) -> "Segment":
        self._map[0] = 1
        return self


class Segments:
    """Those of one channel, at the end that sends. There are as many as were ever in use at once."""

    def __init__(self) -> None:
        self._all: list[Segment] = []
        self._capacity = 0

    def take(self, size: int) -> Segment:
        """One with room for so many bytes; the data begin at `ALIGNMENT`."""
        for segment in self._all:
            if segment.capacity >= size and segment.free:
                return segment.take()
        self._capacity = max(self._capacity, padded(size + size // 8))
        self._all.append(Segment(len(self._all), self._capacity))
        return self._all[-1].take()


class Attached:
    """The same memory at the end that receives."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._maps: dict[int, mmap.mmap] = {}

    def memory(self, name: int) -> Tensor:
        """A segment's memory, from its name. Its sender may use it again when nothing refers to this any more."""
        number, descriptor = (name ^ _MARK) >> _NUMBER_BITS, name & ((1 << _NUMBER_BITS) - 1)
        found = self._maps.get(number)
        if found is None:
            found = self._maps[number] = _opened(self._process, descriptor)
        view = memoryview(found)
        made: Tensor = torch.frombuffer(view, dtype=torch.uint8)
        weakref.finalize(view, _take_down, found).atexit = False
        return made


def is_name(value: int) -> bool:
    """Whether a number in a header is the name of a segment."""
    return value >= _MARK


def _take_down(memory: mmap.mmap) -> None:
    memory[0] = 0


def _opened(process: int, descriptor: int) -> mmap.mmap:
    mine = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(mine, 0)
    finally:
        os.close(mine)


def sharers(group: Any, device: int) -> dict[int, tuple[int, bool]]:
    """By device the process of every other rank of the group whose memory this one can open, and whether it can open
    this one's. All ranks of the group call it.
    """
    if group is None or not hasattr(os, "memfd_create"):
        return {}
    probe, token = Segment(0, _SIZE_OF_TOKEN), os.urandom(_SIZE_OF_TOKEN)
    probe.memory[:_SIZE_OF_TOKEN] = torch.frombuffer(bytearray(token), dtype=torch.uint8)
    descriptor = probe.name & ((1 << _NUMBER_BITS) - 1)
    words = [os.getpid(), descriptor, *(int.from_bytes(token[i : i + 4], "big") for i in (0, 4, 8, 12))]
    rows = _everywhere(group, words)
    seen = [other == device or _holds(row) for other, row in enumerate(rows)]
    views = _everywhere(group, [int(each) for each in seen])
    return {
        other: (rows[other][0], bool(views[other][device]))
        for other in range(len(rows))
        if other != device and seen[other]
    }


def _everywhere(group: Any, numbers: list[int]) -> list[list[int]]:
    mine = torch.tensor(numbers)
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather([rows], [mine]).wait()
    return [row.tolist() for row in rows]


def _holds(row: Sequence[int]) -> bool:
    """Whether that is the memory it should be: in another container the same numbers are another process."""
    process, descriptor, *words = row
    try:
        found = _opened(process, descriptor)[:_SIZE_OF_TOKEN]
    except (OSError, ValueError):
        return False
    return found == b"".join(word.to_bytes(4, "big") for word in words)
