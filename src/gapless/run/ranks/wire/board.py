"""What both ends of a channel in GPU memory see, and their GPUs too: a few numbers, and where the slots are."""

import ctypes
import mmap
import os
import struct

from gapless.run.ranks.wire.cuda_driver import Driver
from gapless.run.ranks.wire.shared_memory import memory_file

MOST_REGIONS = 4096
ARRIVED, DONE, QUEUED = 0, 64, 128
"""Messages that are in their slots, that were copied out, and of which copying out is queued; in bytes on a board."""
RELEASED = 1 << 62  # more than any message
_HANDLE = struct.Struct("<64sQ")  # of a region, and how many bytes each slot of it has


class Board:
    """What both ends of a channel see: three numbers, and where regions are. The sender has made it."""

    def __init__(self, driver: Driver, memory: mmap.mmap) -> None:
        self._driver, self.memory = driver, memory
        self._place = (ctypes.c_char * mmap.PAGESIZE).from_buffer(memory)
        self._address = ctypes.addressof(self._place)
        self._numbers = {at: ctypes.c_uint64.from_buffer(memory, at) for at in (ARRIVED, DONE, QUEUED)}
        self.device_address = driver.register(self._address, mmap.PAGESIZE)

    @classmethod
    def made(cls, driver: Driver) -> "tuple[Board, int]":
        """A new one, and the file descriptor by which the other end opens it."""
        descriptor = memory_file()
        os.ftruncate(descriptor, mmap.PAGESIZE + MOST_REGIONS * _HANDLE.size)
        return cls(driver, mmap.mmap(descriptor, 0)), descriptor

    def number(self, which: int) -> int:
        place = self._numbers.get(which)  # once: any thread may ask, also when it is closed and nobody waits any more
        return RELEASED if place is None else place.value

    def set(self, which: int, number: int) -> None:
        place = self._numbers.get(which)
        if place is not None:
            place.value = number

    def announce(self, region: int, handle: bytes, capacity: int) -> None:
        """To be done before a message names it."""
        _HANDLE.pack_into(self.memory, mmap.PAGESIZE + region * _HANDLE.size, handle, capacity)

    def region(self, number: int) -> tuple[bytes, int]:
        """Its handle, and how many bytes each slot of it has."""
        handle, capacity = _HANDLE.unpack_from(self.memory, mmap.PAGESIZE + number * _HANDLE.size)
        return handle, capacity

    def close(self) -> None:
        self._driver.unregister(self._address)
        self._numbers.clear()
        del self._place
