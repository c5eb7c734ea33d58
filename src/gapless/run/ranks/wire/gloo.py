"""Channels over Gloo, with a tag for each kind: between hosts, and wherever processes share no memory."""

import queue
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gapless.run.ranks.wire.channel import Incoming, Outgoing, tag_of
from gapless.run.ranks.wire.host_memory import Memory
from gapless.run.ranks.wire.message import HEADER_SIZE, Blank, Message, Reader, Writer, announced, announcement
from gapless.run.ranks.wire.windows import FIRST_CAPACITY, Windows

if TYPE_CHECKING:
    from gapless.run.ranks.wire.links import Links

_BYTES_KEPT = 4 << 20  # of sends that may be over, before somebody looks
_SENDS_KEPT = 16

assert HEADER_SIZE <= FIRST_CAPACITY


class GlooOutgoing(Outgoing):
    """Posts sends, and lets go of them when they are over."""

    def __init__(self, links: "Links", target: int, kind: str, memory: Memory | None = None) -> None:
        super().__init__(links, memory)
        self._target, self._tag = target, tag_of(kind)
        self._writer = Writer(pinned=self.memory.pinned, device=self.memory.device)
        self._windows = Windows()
        self._post: Any = self.courier.group.send
        self._sends: list[tuple[Any, Message | None]] = []
        self._bytes = 0

    def send(self, item: Any) -> None:
        self.post(self.memory.write(self._writer, item))

    def post(self, message: Message) -> None:
        size = message.buffer.numel()
        if size <= self._windows.capacity:
            self._sends.append((self._post([message.buffer], self._target, self._tag), message))
            self._windows.passed()
        else:
            self._sends.append((self._post([announcement(size)], self._target, self._tag), None))
            self._sends.append((self._post([message.buffer], self._target, self._tag + 1), message))
            self._windows.passed(size)
        self._bytes += size
        self.last_size = size
        if self._bytes > _BYTES_KEPT or len(self._sends) >= _SENDS_KEPT:
            self.settle()

    def close(self) -> None:
        self._post = None

    def settle(self) -> None:
        self.courier.retire(self._sends)
        self._sends, self._bytes = [], 0


class GlooIncoming(Incoming):
    """Receives are posted ahead, by the courier."""

    def __init__(self, links: "Links", source: int, kind: str, fetch: Callable[[int], Tensor] | None = None) -> None:
        super().__init__(links, source, kind)
        self._courier = links.courier
        self._tag = tag_of(kind)
        self._pinned = links.memory.pinned and fetch is None
        self._reader = Reader(pinned=self._pinned, fetch=fetch)
        self._windows = Windows()
        self._posted: queue.SimpleQueue[tuple[Any, Blank]] = queue.SimpleQueue()
        for _ in range(2):
            self._courier.put((self._post, self._windows.first))

    def _post(self, block: tuple[int, int]) -> None:
        number, capacity = block
        for _ in range(number):
            blank = self._reader.blank(capacity)
            try:
                work = self._courier.group.recv([blank.buffer], self.source, self._tag)
            except RuntimeError as error:
                work = _Failed(error)
            self._posted.put((work, blank))

    def next(self) -> Any:
        work, blank = self._posted.get()
        work.wait()
        tree = blank.read()
        return self._read(blank.buffer) if tree is None else self._passed(tree)

    def _read(self, buffer: Tensor) -> Any:
        """A message of another kind than the last."""
        size = announced(buffer)
        if size:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
            self._courier.group.recv([buffer], self.source, self._tag + 1).wait()
        return self._passed(self._reader.read(buffer), size)

    def close(self) -> None:
        while not self._posted.empty():
            self._posted.get()

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
