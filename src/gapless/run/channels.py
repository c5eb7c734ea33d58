"""Channels: what carries a program's tensors from device to device, and how threads of one process do it.

A channel is (source device, target device, kind) and delivers in the producer's order. A device never waits for what it
sends. Consumers may want another order than the producer's: whatever carries the messages, `InOrderOfUse` sorts them.
"""

import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gapless.schedule.action import Schedule
from gapless.schedule.pools import receive_buffers
from gapless.schedule.routes import Channel, messages

_STOP, _NOTHING = object(), object()


class StoppedError(Exception):
    """Another device failed, so this one need not go on. Never reaches the user."""


class Transport(Protocol):
    """The channels of one program."""

    def in_stream(self, channel: Channel) -> bool:
        """Whether it takes and brings tensors as they are, in the order of the current stream, and not in parcels."""

    def sender(self, channel: Channel, *, idle: bool = False) -> Callable[[Any], None]:
        """Takes what the next producer of this channel has made, and does not wait. A device that is `idle` next, since
        it needs something from another one, may as well send it itself.
        """

    def receiver(self, channel: Channel) -> Callable[[], Any]:
        """Each call returns what the next consumer of this channel needs, and waits until it is there."""

    def begin(self) -> None:
        """A step starts."""

    def end(self) -> None:
        """A device has done all it has to do in this step."""

    def drain(self, counts: Mapping[Channel, tuple[int, int]]) -> None:
        """A device runs its forwards again: of these channels it takes what was sent before and not taken yet."""

    def stop(self) -> None:
        """Wake every device that waits; it raises StoppedError."""

    def clear(self) -> None:
        """Ready for the next step, whatever was left behind."""


class InOrderOfUse:
    """Takes the messages of one channel in the order they are used in, which may differ from the order they come in.

    `get` waits for the next one that comes; `order` has the number of each as it was produced. What came early is kept
    in one of `slots` places, as many as the proof that nothing hangs says: message n in place n modulo `slots`.
    """

    def __init__(self, get: Callable[[], Any], order: Sequence[int], slots: int) -> None:
        self._get, self._order = get, order
        self._early: list[Any] = [_NOTHING] * slots
        self._came = self._taken = 0
        if slots == 1:
            self.take = get  # type: ignore[method-assign]

    def take(self) -> Any:
        """What is used next."""
        number, early = self._order[self._taken], self._early
        while self._came <= number:
            slot = self._came % len(early)
            assert early[slot] is _NOTHING, f"message {self._came} finds its place taken: more than {len(early)} wait"
            early[slot] = self._get()
            self._came += 1
        self._taken += 1
        if self._taken == len(self._order):
            self._taken = self._came = 0
        slot = number % len(early)
        message, early[slot] = early[slot], _NOTHING
        return message

    def drain(self, sent: int, taken: int) -> None:
        """Of so many messages that were sent so many were taken: the others come, and are dropped."""
        for _ in range(sent - max(self._came, taken)):
            self._get()
        self.clear()

    def clear(self) -> None:
        """The next message is the first of a step."""
        self._early[:] = [_NOTHING] * len(self._early)
        self._came = self._taken = 0


def takers(schedule: Schedule, gets: Mapping[Channel, Callable[[], Any]]) -> dict[Channel, InOrderOfUse]:
    """What takes from each of these channels. It has as many slots as `verify` reports buffers."""
    produced, consumed = messages(schedule)
    slots = receive_buffers(schedule)
    return {
        channel: InOrderOfUse(get, [produced[channel][message] for message, _ in consumed[channel]], slots[channel])
        for channel, get in gets.items()
    }


class ThreadChannels:
    """What crosses between the devices of one process, for one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        produced, _ = messages(schedule)
        self._queues: dict[Channel, queue.SimpleQueue[Any]] = {channel: queue.SimpleQueue() for channel in produced}
        self._takers = takers(schedule, {channel: _unless_stopped(each) for channel, each in self._queues.items()})

    def in_stream(self, channel: Channel) -> bool:
        return False

    def sender(self, channel: Channel, *, idle: bool = False) -> Callable[[Any], None]:
        return self._queues[channel].put

    def receiver(self, channel: Channel) -> Callable[[], Any]:
        return self._takers[channel].take

    def begin(self) -> None:
        """Nothing to do."""

    def end(self) -> None:
        """Nothing to do: what was received is there."""

    def drain(self, counts: Mapping[Channel, tuple[int, int]]) -> None:
        for channel, (sent, taken) in counts.items():
            self._takers[channel].drain(sent, taken)

    def stop(self) -> None:
        for waiting in self._queues.values():
            waiting.put(_STOP)

    def clear(self) -> None:
        for waiting in self._queues.values():
            while not waiting.empty():
                waiting.get()
        for taker in self._takers.values():
            taker.clear()


def _unless_stopped(waiting: "queue.SimpleQueue[Any]") -> Callable[[], Any]:
    get = waiting.get

    def next_one() -> Any:
        parcel = get()
        if parcel is _STOP:
            raise StoppedError
        return parcel

    return next_one
