"""The two ends of a channel between processes. Messages go over Gloo, with a tag for each kind of channel."""

import queue
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gapless.run.segments import Attached, Segments
from gapless.run.windows import FIRST_CAPACITY, Windows
from gapless.run.wire import HEADER_SIZE, Blank, Message, Reader, Writer, announced, announcement

if TYPE_CHECKING:
    from gapless.run.distributed import Links

_BYTES_KEPT = 4 << 20  # of sends that may be over, before somebody looks
_SENDS_KEPT = 16
_SMALL = 64 << 10
_TAGS = {"activation": 2, "gradient": 4, "loss": 6}
_TAGS_OF_SHARED = {"tied": 8, "total": 10}


def _tag(kind: str) -> int:
    """Between two ranks; the next number is for messages that did not fit. Shared parameters have a number."""
    name, _, number = kind.partition(" ")
    return _TAGS[name] if not number else _TAGS_OF_SHARED[name] + 4 * int(number)


assert HEADER_SIZE <= FIRST_CAPACITY


class Outgoing:
    """The near end of a channel that leaves this process."""

    def __init__(self, links: "Links", target: int, kind: str) -> None:
        courier = self._courier = links.courier
        self._target, self._tag = target, _tag(kind)
        self._memory = links.memory
        _, opens = links.sharers.get(target, (0, False))
        segments = Segments() if opens else None
        self._writer = Writer(pinned=links.memory.pinned, device=links.memory.device, segments=segments)
        self._windows = Windows()
        self._post: Any = courier.group.send
        self._payload = links.payload(links.device, target, kind)
        self._sends: list[tuple[Any, Message | None]] = []
        self._bytes = 0
        self._handed = self._done = 0  # to the courier, and by it
        self._last_size = _SMALL + 1  # unknown

    def put(self, item: Any) -> None:
        """Hands over what a lane has packed; the courier does the rest."""
        self._handed += 1
        self._courier.put((self._send_next, item))

    def put_now(self, item: Any) -> None:
        """The same for a device that has nothing else to do: it sends a small message itself, which then leaves earlier
        by what it takes to wake the courier.
        """
        if self._handed == self._done and self._last_size <= _SMALL:
            self.send(item)
        else:
            self.put(item)

    def _send_next(self, item: Any) -> None:
        try:
            self.send(item)
        finally:
            self._done += 1

    def hand(self, tree: Any) -> None:
        """The same for a result of the calling thread."""
        self.put(self._memory.packed(tree))

    def send(self, item: Any) -> None:
        """In the calling thread."""
        message = self._memory.write(self._writer, item)
        size = message.buffer.numel()
        if size <= self._windows.capacity:
            self._sends.append((self._post([message.buffer], self._target, self._tag), message))
            self._windows.passed()
        else:
            self._sends.append((self._post([announcement(size)], self._target, self._tag), None))
            self._sends.append((self._post([message.buffer], self._target, self._tag + 1), message))
            self._windows.passed(size)
        if message.data is not None and message.data.numel():
            self._sends.append((self._payload.send([message.data], 1 - self._payload.rank(), 0), message))
        self._bytes += size
        self._last_size = message.size
        if self._bytes > _BYTES_KEPT or len(self._sends) >= _SENDS_KEPT:
            self.settle()

    def close(self) -> None:
        self._post = self._payload = None

    def settle(self) -> None:
        """What was sent will be let go of."""
        self._courier.retire(self._sends)
        self._sends, self._bytes = [], 0


class Incoming:
    """The near end of a channel that comes into this process."""

    def __init__(self, links: "Links", source: int, kind: str) -> None:
        self._links, self.source, self.kind = links, source, kind
        courier = self._courier = links.courier
        self._tag = _tag(kind)
        self._payload = links.payload(source, links.device, kind)
        attached = Attached(links.sharers[source][0]) if source in links.sharers else None
        fetch = None if self._payload is None else self._fetch
        self._reader = Reader(pinned=links.memory.pinned, fetch=fetch, attached=attached)
        self._windows = Windows()
        self._posted: queue.SimpleQueue[tuple[Any, Blank]] = queue.SimpleQueue()
        for _ in range(2):
            courier.put((self._post, self._windows.first))

    def _post(self, block: tuple[int, int]) -> None:
        number, capacity = block
        for _ in range(number):
            blank = self._reader.blank(capacity)
            try:
                work = self._courier.group.recv([blank.buffer], self.source, self._tag)
            except RuntimeError as error:
                work = _Failed(error)
            self._posted.put((work, blank))

    def get(self) -> Any:
        """The next message, once it is there."""
        links = self._links
        links.waits_in, links.since = self, (since := time.monotonic())
        try:
            work, blank = self._posted.get()
            work.wait()
            tree = blank.read()
            tree = self._read(blank.buffer) if tree is None else self._passed(tree)
        except RuntimeError as error:
            raise links.lost(error) from None
        links.since = None
        links.waited += time.monotonic() - since
        return tree

    def _read(self, buffer: Tensor) -> Any:
        """A message of another kind than the last."""
        size = announced(buffer)
        if size:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._links.memory.pinned)
            self._courier.group.recv([buffer], self.source, self._tag + 1).wait()
        return self._passed(self._reader.read(buffer), size)

    def close(self) -> None:
        self._payload = None
        while not self._posted.empty():
            self._posted.get()

    def _fetch(self, size: int) -> Tensor:
        """Tensors that come their own way; on a GPU the current stream waits for them."""
        data = torch.empty(size, dtype=torch.uint8, device=self._links.memory.device)
        if size:
            self._payload.recv([data], 1 - self._payload.rank(), 0).wait()
        return data

    def _passed(self, tree: Any, size: int = 0) -> Any:
        block = self._windows.passed(size)
        if block is not None:
            self._courier.put((self._post, block))
        return tree


class _Failed:
    """A receive that could not even be posted."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error
