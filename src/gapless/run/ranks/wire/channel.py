"""The two ends of a channel between processes, whichever way its messages go, and the courier that works for them.

Posting a message costs host time, so one thread of a process, its courier, does all of it; computing goes on meanwhile.
To take a message a device waits for the posted receive itself, so that it is woken once:

    device    ... F(0) -put-> queue        ...            F(1): wait for the posted receive, read
    courier             \\-> write, send   retire sends   post receives ahead
"""

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from itertools import permutations
from typing import Any

import torch

from gapless.run.ranks.wire.call_stamp import Stamp
from gapless.run.ranks.wire.message import Message
from gapless.schedule.routes import Channel

DIRECT = ("activation", "gradient")
"""What may go from GPU to GPU; the rest is small, or rare, and goes by way of the host."""
PASSED = "passed"
"""What another thread than the device's waits for, so that it comes by itself."""
SMALL = 64 << 10
_PATIENCE = 0.5  # seconds
_TAGS = {PASSED: 0, "activation": 2, "gradient": 4, "loss": 6, "update": 8}
_TAGS_OF_SHARED = {"tied": 10, "total": 12}


def tag_of(kind: str) -> int:
    """Between two ranks; the next number is free for what a channel needs it for. Shared parameters have a number."""
    name, _, number = kind.partition(" ")
    return _TAGS[name] if not number else _TAGS_OF_SHARED[name] + 4 * int(number)


class Courier:
    """The thread that posts, and the one that lets go of what was sent. The first failure is kept for all to see, and
    told.
    """

    def __init__(self, group: Any, name: str, tell: Callable[[BaseException], None]) -> None:
        self.group, self._tell = group, tell
        self.stamp = Stamp()  # of the call that this rank is in
        self.failure: BaseException | None = None
        self._jobs: queue.SimpleQueue[tuple[Callable[[Any], None], Any] | None] = queue.SimpleQueue()
        self.put = self._jobs.put
        self._over: queue.SimpleQueue[list[tuple[Any, Message | None]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._post, name=f"{name} posts", daemon=True),
            threading.Thread(target=self._retire, name=f"{name} retires", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def retire(self, sends: list[tuple[Any, Message | None]]) -> None:
        """Lets go of these once they are over; they are never looked at one by one, since waking up costs too."""
        self._over.put(sends)

    def _post(self) -> None:
        torch.set_grad_enabled(False)
        while (job := self._jobs.get()) is not None:
            do, argument = job
            try:
                do(argument)
            except BaseException as error:
                self.failure = self.failure or error
                self._tell(error)
            del job, do, argument  # what was sent must not stay until the next one comes
        self._over.put(None)

    def _retire(self) -> None:
        while (sends := self._over.get()) is not None:
            for work, message in sends:
                try:
                    work.wait()
                    if message is not None:
                        message.sent()
                except BaseException as error:
                    self.failure = self.failure or error
            sends.clear()
            del sends

    def flush(self) -> None:
        """Returns when everything handed over so far is done."""
        done = threading.Event()
        self.put((lambda _: done.set(), None))
        done.wait()

    def close(self, broken: Callable[[], bool] = lambda: False) -> None:
        """Everything handed over goes out first, unless connections are broken: Gloo forgets some sends then, and the
        thread that waits for them is left to the end of the process.
        """
        self.put(None)
        for thread in self._threads:
            while thread.is_alive():
                given_up = broken()
                thread.join(_PATIENCE)
                if given_up:
                    break


class Outgoing(ABC):
    """The near end of a channel that leaves this process. Sends never block: what can't leave yet waits here."""

    def __init__(self, courier: Courier) -> None:
        self.courier = courier
        self.last_size = SMALL + 1  # unknown
        self._handed = self._done = 0  # to the courier, and by it

    def put(self, item: Any) -> None:
        """Hands over what a lane has packed; the courier does the rest."""
        self._handed += 1
        self.courier.put((self._send_next, (item, self.courier.stamp.now)))

    def put_now(self, item: Any) -> None:
        """The same for a device that has nothing else to do: it sends a small message itself, which then leaves earlier
        by what it takes to wake the courier.
        """
        if self._handed == self._done and self.last_size <= SMALL:
            self.send(item)
        else:
            self.put(item)

    def hand(self, tree: Any) -> None:
        """The same for a result of the calling thread."""
        self.put(self.packed(tree))

    def packed(self, tree: Any) -> Any:
        """A result of the calling thread, as `send` takes it in another."""
        return tree

    def _send_next(self, item: tuple[Any, bytes]) -> None:
        try:
            self.send(*item)
        finally:
            self._done += 1

    @abstractmethod
    def send(self, item: Any, stamp: bytes | None = None) -> None:
        """In the calling thread. It belongs to the call of the stamp, or to that of this moment."""

    def begin(self, program: object) -> None:  # noqa: B027
        """A step starts that sends what the first one of its program did."""

    def end(self) -> None:  # noqa: B027
        """It is over: what comes next may be anything."""

    @abstractmethod
    def settle(self) -> None:
        """What was sent will be let go of."""

    def is_over(self) -> bool:
        """Whether this process may go: all that was sent is on its way, or nobody is there to take it."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Lets go of the connection."""


class Waiting:
    """What this device waits for, for any thread to read. `explain` makes what is raised where it will not come, and
    `refuse` where it was sent in another call than that of this rank, `stamp`.
    """

    def __init__(
        self,
        explain: Callable[[int, BaseException], Exception],
        stamp: Stamp,
        refuse: Callable[[bytes, int], Exception],
    ) -> None:
        self.explain, self.stamp, self.refuse = explain, stamp, refuse
        self.channel: Incoming | None = None
        self.since: float | None = None
        self.seconds = 0.0  # in all


class Incoming(ABC):
    """The near end of a channel that comes into this process."""

    def __init__(self, waiting: Waiting, source: int, kind: str) -> None:
        self._waiting, self.source, self.kind = waiting, source, kind

    def get(self) -> Any:
        """The next message, once it is there."""
        waiting = self._waiting
        waiting.channel, waiting.since = self, (since := time.monotonic())
        try:
            tree = self.next()
        except RuntimeError as error:
            raise waiting.explain(self.source, error) from None
        waiting.since = None
        waiting.seconds += time.monotonic() - since
        return tree

    def begin(self, program: object) -> None:  # noqa: B027
        """A step starts that brings what the first one of its program did."""

    def end(self) -> None:  # noqa: B027
        """It is over: what comes next may be anything."""

    @abstractmethod
    def next(self) -> Any:
        """The same; raises RuntimeError if it will not come."""

    def check(self, stamp: bytes) -> None:
        """A message is here that was sent in that call."""
        if stamp != self._waiting.stamp.now:
            raise self._waiting.refuse(stamp, self.source)

    @abstractmethod
    def close(self) -> None:
        """Lets go of the connection."""


class Carrier(ABC):
    """Brings messages to some devices, or to all: of those that reach another device, a channel takes the first."""

    name = ""  # what it is called where a person reads it
    shares_memory = False  # so that it reaches devices of one host only
    in_stream = False  # tensors of a GPU come and go in the order of the current stream

    def carries(self, channel: Channel) -> bool:
        """Whether it would, between any two devices: all ranks say the same."""
        return True

    def reaches(self, device: int, kind: str) -> bool:
        """Whether messages of that kind can go to that device and come from it."""
        return True

    def connect(self, channels: Iterable[Channel]) -> None:  # noqa: B027
        """Every rank is about to use the same channels. What meets its other end before it is used does so here."""

    @abstractmethod
    def outgoing(self, target: int, kind: str) -> Outgoing:
        """The near end of a new channel."""

    @abstractmethod
    def incoming(self, source: int, kind: str) -> Incoming:
        """The near end of a new channel."""

    @abstractmethod
    def break_off(self) -> None:
        """From any thread: whoever waits raises, here and at the other ranks."""

    def in_child(self) -> None:  # noqa: B027
        """A forked child has copies of what only this process reads."""

    def close(self) -> None:  # noqa: B027
        """All channels are closed."""


def reach_in_streams(carriers: Iterable[Carrier], devices: int) -> bool:
    """Whether all devices are GPUs that reach each other's memory: all ranks say the same."""
    found = [carrier for carrier in carriers if carrier.shares_memory and carrier.in_stream]
    pairs = permutations(range(devices), 2)
    return all(any(carrier.carries((a, b, DIRECT[0])) for carrier in found) for a, b in pairs)
