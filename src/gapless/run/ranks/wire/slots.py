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
that was queued can wait for itself. (But for slots that are kept for one message of every step: see `rehearsal`.)
"""

from typing import NamedTuple

from gapless.run.ranks.wire.layout import padded

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
