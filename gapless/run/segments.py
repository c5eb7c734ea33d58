"""Memory that two processes of one host share: a large tensor is written once, and read where it is.

    sender     | flag | data ...          sets the flag, writes, and names the segment in its message
    receiver     the same memory          takes the flag down when the last tensor in it is gone

The memory has no name in any file system: whoever knows the process and its file descriptor can open it, and when the
processes end, whatever the reason, nothing is left behind.
"""

import functools
import mmap
import os
import struct
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from gapless.run.layout import ALIGNMENT, padded

_NUMBER_BITS = 31
_MARK = 1 << 62  # in a header: the tensors are in a segment, of this number and file descriptor
_DESCRIPTOR = (1 << _NUMBER_BITS) - 1
_TOKEN = ">IIII"
_SIZE_OF_TOKEN = struct.calcsize(_TOKEN)


class Segment:
    """Some shared memory on the side of its owner."""

    def __init__(self, number: int, capacity: int) -> None:
        self._descriptor = os.memfd_create("gapless", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, ALIGNMENT + capacity)
        self._map = mmap.mmap(self._descriptor, ALIGNMENT + capacity)
        self.capacity = capacity
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self.name = _MARK | number << _NUMBER_BITS | self._descriptor
        self.messages: dict[int, Any] = {}  # that were made for it, by the number of their layout
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
        self._leases: dict[int, weakref.ref[memoryview]] = {}

    def memory(self, name: int) -> memoryview:
        """A segment's memory, from its name. Its sender may use it again when nothing refers to this any more."""
        found = self._maps.get(name)
        if found is None:
            found = self._maps[name] = _opened(self._process, name & _DESCRIPTOR)
        view = memoryview(found)
        self._leases[name] = weakref.ref(view, functools.partial(_take_down, found))
        return view


def _take_down(memory: mmap.mmap, _: object) -> None:
    memory[0] = 0


def file_of(process: int, descriptor: int) -> str:
    """By which another process of this host can open it."""
    return f"/proc/{process}/fd/{descriptor}"


def _opened(process: int, descriptor: int) -> mmap.mmap:
    mine = os.open(file_of(process, descriptor), os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(mine, 0)
    finally:
        os.close(mine)


class Probe:
    """Some memory to be found by others: in another container the same numbers are another process."""

    def __init__(self) -> None:
        self._segment, token = Segment(0, _SIZE_OF_TOKEN), os.urandom(_SIZE_OF_TOKEN)
        self._segment.memory[:_SIZE_OF_TOKEN] = torch.frombuffer(bytearray(token), dtype=torch.uint8)
        self.words = [self._segment.name & _DESCRIPTOR, *struct.unpack(_TOKEN, token)]

    @staticmethod
    def sees(process: int, words: Sequence[int]) -> bool:
        """Whether this process can open another one's, given its words."""
        descriptor, *token = words
        try:
            found = _opened(process, descriptor)[:_SIZE_OF_TOKEN]
        except (OSError, ValueError):
            return False
        return found == struct.pack(_TOKEN, *token)
