"""The two ends of a channel between processes, whichever way its messages go."""

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from gapless.run.ranks.wire.host_memory import Memory

if TYPE_CHECKING:
    from gapless.run.ranks.wire.links import Links

SMALL = 64 << 10
_TAGS = {"activation": 2, "gradient": 4, "loss": 6}
_TAGS_OF_SHARED = {"tied": 8, "total": 10}


def tag_of(kind: str) -> int:
    """Between two ranks; the next number is free for what a channel needs it for. Shared parameters have a number."""
    name, _, number = kind.partition(" ")
    return _TAGS[name] if not number else _TAGS_OF_SHARED[name] + 4 * int(number)


class Outgoing(ABC):
    """The near end of a channel that leaves this process."""

    def __init__(self, links: "Links", memory: Memory | None = None) -> None:
        self.courier, self.memory = links.courier, memory or links.memory
        self.last_size = SMALL + 1  # unknown
        self._handed = self._done = 0  # to the courier, and by it

    def put(self, item: Any) -> None:
        """Hands over what a lane has packed; the courier does the rest."""
        self._handed += 1
        self.courier.put((self._send_next, item))

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
        self.put(self.memory.packed(tree))

    def _send_next(self, item: Any) -> None:
        try:
            self.send(item)
        finally:
            self._done += 1

    @abstractmethod
    def send(self, item: Any) -> None:
        """In the calling thread."""

    @abstractmethod
    def settle(self) -> None:
        """What was sent will be let go of."""

    def is_over(self) -> bool:
        """Whether this process may go: all that was sent is on its way, or nobody is there to take it."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Lets go of the connection."""


class Incoming(ABC):
    """The near end of a channel that comes into this process."""

    def __init__(self, links: "Links", source: int, kind: str) -> None:
        self.links, self.source, self.kind = links, source, kind

    def get(self) -> Any:
        """The next message, once it is there."""
        links = self.links
        links.waits_in, links.since = self, (since := time.monotonic())
        try:
            tree = self.next()
        except RuntimeError as error:
            raise links.lost(error) from None
        links.since = None
        links.waited += time.monotonic() - since
        return tree

    @abstractmethod
    def next(self) -> Any:
        """The same; raises RuntimeError if it will not come."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the connection."""
