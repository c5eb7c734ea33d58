"""Which piece of a sender's memory the next message takes, as a state machine without a GPU.

    sender     | slot 0 | slot 1 | ...     copies message n into a slot, tells the receiver's host, and goes on
    receiver                               copies it out in its own time, and counts

Messages are copied out in the order they were sent in, so two numbers say all of it: how many copies the receiver's
host has queued (`queued`), and how many its GPU has done (`done`). A slot is taken

    1. if its message was copied out: at once
    2. if there are fewer slots than are to be used at once: a new one
    3. if copying out its message is queued: the stream of the sender waits for that, and its host does not
    4. else: a new one, since sends never block

A stream waits only for what some stream has queued already, so whoever waits for whom, it goes back in time: nothing
that was queued can wait for itself. (But for slots that are kept for one message of every step: see
`static_shapes`.)

The numbers, and where the slots are, stand on a board that both ends see, and their GPUs too.
"""

import ctypes
import mmap
import os
import struct
from typing import NamedTuple

from gapless.run.ranks.wire.gpu_memory.cuda_driver import Driver
from gapless.run.ranks.wire.layout import padded
from gapless.run.ranks.wire.shared_memory import memory_file

_BYTES_AT_ONCE, _FEWEST_AT_ONCE, _MOST_AT_ONCE = 64 << 20, 2, 8
_MOST_CHANNELS = 4  # that leave a device: activations and gradients, to two neighbours


def capacity_for(size: int) -> int:
    """Bytes of a slot for messages of that size, and a little more."""
    return padded(size + size // 8)


def at_once(capacity: int) -> int:
    """How many slots of a channel are used before one is waited for."""
    return max(_FEWEST_AT_ONCE, min(_MOST_AT_ONCE, _BYTES_AT_ONCE // capacity))


def most_bytes(largest: int) -> int:
    """Of all slots of a device, for messages of at most that size."""
    capacity = capacity_for(largest)
    return _MOST_CHANNELS * at_once(capacity) * capacity if largest else 0


class Slot:
    """Some bytes of a region: memory that is opened at once. `message` is the number of the last one in it."""

    __slots__ = ("address", "capacity", "message", "name")

    def __init__(self, name: int, address: int, capacity: int) -> None:
        self.name, self.address, self.capacity = name, address, capacity
        self.message = -1


class Taken(NamedTuple):
    """A slot for the next message, and how many copies must be done before it may be written: none if 0."""

    slot: Slot
    after: int


class Slots:
    """Those of one channel, at the end that sends."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []  # the one that was used longest ago first
        self.sent = 0

    def take(self, size: int, at_once: int, queued: int, done: int) -> Taken | None:
        """For the next message; None if a new slot is wanted. `at_once` are to be used before one is waited for."""
        fitting = [slot for slot in self._slots if slot.capacity >= size]
        if not fitting:
            return None
        oldest = fitting[0]
        if oldest.message < done:
            return self._take(oldest, 0)
        if len(fitting) < at_once or oldest.message >= queued:
            return None
        return self._take(oldest, oldest.message + 1)

    def add(self, slots: list[Slot]) -> None:
        """More of them."""
        self._slots[:0] = slots

    def keep(self, slot: Slot) -> None:
        """For one message of every step: `take` takes it no more."""
        self._slots.remove(slot)

    def again(self, slot: Slot) -> Taken:
        """One that is kept, for the next message."""
        after, slot.message = slot.message + 1, self.sent
        self.sent += 1
        return Taken(slot, after)

    def _take(self, slot: Slot, after: int) -> Taken:
        self._slots.remove(slot)
        self._slots.append(slot)
        slot.message = self.sent
        self.sent += 1
        return Taken(slot, after)


MOST_REGIONS = 4096
LEAST_REGION = 2 << 20  # bytes: what the driver shares is no less
DESCRIPTOR_BITS, PLACE_BITS = 31, 16
DESCRIPTOR, PLACE = (1 << DESCRIPTOR_BITS) - 1, (1 << PLACE_BITS) - 1
MARK = 1 << 62  # in a header: the tensors are in a slot; its region, its place there, and the board's descriptor
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
