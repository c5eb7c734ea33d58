"""Channels: what carries a program's tensors from device to device, and how threads of one process do it.

A channel is (source device, target device, kind) and delivers in the producer's order. A device never waits for what it
sends. Consumers may want another order than the producer's: whatever carries the messages, `InOrderOfUse` sorts them.
"""

import queue
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gapless.schedule.action import Schedule
from gapless.schedule.routes import Channel, messages

_STOP = object()


class StoppedError(Exception):
    """Another device failed, so this one need not go on. Never reaches the user."""


class Transport(Protocol):
    """The channels of one program."""

    def sender(self, channel: Channel, *, idle: bool = False) -> Callable[[Any], None]:
        """Takes what the next producer of this channel has made, and does not wait. A device that is `idle` next, since
        it needs something from another one, may as well send it itself.
        """

    def receiver(self, channel: Channel) -> Callable[[], Any]:
        """Each call returns what the next consumer of this channel needs, and waits until it is there."""

    def stop(self) -> None:
        """Wake every device that waits; it raises StoppedError."""

    def clear(self) -> None:
        """Ready for the next step, whatever was left behind."""


class InOrderOfUse:
    """Takes the messages of one channel in the order they are used in, which may differ from the order they come in.

    `get` waits for the next one that comes; `order` has the number of each as it was produced. What came early is kept.
    """

    def __init__(self, get: Callable[[], Any], order: Sequence[int]) -> None:
        self._get, self._order = get, order
        self._early: dict[int, Any] = {}
        self._came = self._taken = 0
        if list(order) == sorted(order):
            self.take = get  # type: ignore[method-assign]

    def take(self) -> Any:
        """What is used next."""
        number, early = self._order[self._taken], self._early
        while number not in early:
            early[self._came] = self._get()
            self._came += 1
        self._taken += 1
        if self._taken == len(self._order):
            self._taken = self._came = 0
        return early.pop(number)

    def clear(self) -> None:
        """The next message is the first of a step."""
        self._early.clear()
        self._came = self._taken = 0


class ThreadChannels:
    """What crosses between the devices of one process, for one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        produced, consumed = messages(schedule)
        self._queues: dict[Channel, queue.SimpleQueue[Any]] = {channel: queue.SimpleQueue() for channel in produced}
        self._takers = {
            channel: InOrderOfUse(_unless_stopped(self._queues[channel]), [produced[channel][each] for each, _ in uses])
            for channel, uses in consumed.items()
        }

    def sender(self, channel: Channel, *, idle: bool = False) -> Callable[[Any], None]:
        return self._queues[channel].put

    def receiver(self, channel: Channel) -> Callable[[], Any]:
        return self._takers[channel].take

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
