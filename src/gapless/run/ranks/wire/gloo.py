"""Channels over Gloo, with a tag for each kind: between hosts, and wherever processes share no memory.

A message that is longer than the receive it meets can't be sent, so the sender must know what was posted, without a
word. Messages come in blocks. Two blocks of receives are posted at any time; when the last message of one was taken,
the next but one is posted, with room for the largest message so far:

    taken     | 0 1 2 3 | 4 5          a message that does not fit says so, and follows as a second one;
    posted              | 6 7 | 8 9    blocks that are posted after that have room for it

Tensors of a GPU go by way of pinned host memory: several processes may share a GPU.
"""

import queue
from typing import Any

import torch
from torch import Tensor

from gapless.run.lanes import Parcel
from gapless.run.ranks.wire.channel import Carrier, Courier, Incoming, Outgoing, Waiting, tag_of
from gapless.run.ranks.wire.message import (
    HEADER_SIZE,
    Blank,
    Message,
    Reader,
    Writer,
    announced,
    announcement,
    stamp_of,
)
from gapless.stage.batch import microbatch as mb

FIRST_CAPACITY = 16 << 10
_BYTES_AHEAD = 4 << 20  # of the receives of one block, where these are more than one
_MOST_AHEAD = 16
_BYTES_KEPT = 4 << 20  # of sends that may be over, before somebody looks
_SENDS_KEPT = 16

assert HEADER_SIZE <= FIRST_CAPACITY


class Windows:
    """One end's count of the messages of a channel: how many receives of what size are posted ahead."""

    def __init__(self) -> None:
        self.first = self._block(FIRST_CAPACITY)
        self._now, self._next = self.first, self.first
        self._left = self._now[0]
        self._largest = FIRST_CAPACITY

    @property
    def capacity(self) -> int:
        """Of the receive that the next message meets."""
        return self._now[1]

    def passed(self, announced: int = 0) -> tuple[int, int] | None:
        """One more message, of which the size is known where it was announced: the block, as number and capacity, that
        is to be posted now, if any is.
        """
        self._largest = max(self._largest, announced + announced // 8)
        self._left -= 1
        if self._left:
            return None
        self._now, self._next = self._next, self._block(self._largest)
        self._left = self._now[0]
        return self._next

    @staticmethod
    def _block(capacity: int) -> tuple[int, int]:
        return max(1, min(_MOST_AHEAD, _BYTES_AHEAD // capacity)), capacity


class GlooOutgoing(Outgoing):
    """Posts sends, and lets go of them when they are over."""

    def __init__(self, courier: Courier, target: int, kind: str, writer: Writer | None = None) -> None:
        super().__init__(courier)
        self._target, self._tag = target, tag_of(kind)
        self._writer = writer or Writer()
        self._windows = Windows()
        self._post: Any = courier.group.send
        self._sends: list[tuple[Any, Message | None]] = []
        self._bytes = 0

    def send(self, item: Any, stamp: bytes | None = None) -> None:
        message = self._writer.write(item)
        message.mark(stamp or self.courier.stamp.now)
        self.post(message)

    def post(self, message: Message) -> None:
        """What was written leaves as soon as the other end has posted its receive."""
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

    def __init__(
        self, courier: Courier, waiting: Waiting, source: int, kind: str, reader: Reader | None = None
    ) -> None:
        super().__init__(waiting, source, kind)
        self._courier, self._tag = courier, tag_of(kind)
        self._reader = reader or Reader()
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
            except RuntimeError as error:  # whoever waits for it is to know
                work = torch.futures.Future[Any]()
                work.set_exception(error)
            self._posted.put((work, blank))

    def next(self) -> Any:
        work, blank = self._posted.get()
        work.wait()
        tree = blank.read()
        if tree is None:
            return self._read(blank.buffer)
        self.check(stamp_of(blank.buffer))
        return self._passed(tree)

    def _read(self, buffer: Tensor) -> Any:
        """A message of another kind than the last."""
        size = announced(buffer)
        if size:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._reader.pinned)
            self._courier.group.recv([buffer], self.source, self._tag + 1).wait()
        self.check(stamp_of(buffer))
        return self._passed(self._reader.read(buffer), size)

    def _passed(self, tree: Any, size: int = 0) -> Any:
        block = self._windows.passed(size)
        if block is not None:
            self._courier.put((self._post, block))
        return tree

    def close(self) -> None:
        while not self._posted.empty():
            self._posted.get()
        self._reader = Reader()  # whatever the old one has opened


class OverGloo(Carrier):
    """Reaches everybody."""

    name = "Gloo"

    def __init__(self, courier: Courier, waiting: Waiting) -> None:
        self._courier, self._waiting = courier, waiting

    def outgoing(self, target: int, kind: str) -> Outgoing:
        return GlooOutgoing(self._courier, target, kind)

    def incoming(self, source: int, kind: str) -> Incoming:
        return GlooIncoming(self._courier, self._waiting, source, kind)

    def break_off(self) -> None:
        if (group := self._courier.group) is not None:  # not closed meanwhile
            group.break_off()

    def close(self) -> None:
        self._courier.group = None


class PinnedOutgoing(GlooOutgoing):
    """Copies to the host on a stream of its own, and posts when the copy is there."""

    def __init__(self, courier: Courier, target: int, kind: str, gpu: torch.device, stream: torch.cuda.Stream) -> None:
        super().__init__(courier, target, kind, Writer(pinned=True))
        self._gpu, self._stream = gpu, stream

    def packed(self, tree: Any) -> Parcel:
        return Parcel(tree, torch.cuda.current_stream(self._gpu).record_event())

    def send(self, item: Parcel, stamp: bytes | None = None) -> None:
        with torch.cuda.stream(self._stream):
            if item.event is not None:
                self._stream.wait_event(item.event)
            message = self._writer.write(item.tree)
            message.mark(stamp or self.courier.stamp.now)
            for tensor in mb.flatten(item.tree)[0]:
                if tensor.is_cuda:
                    tensor.record_stream(self._stream)
            done = torch.cuda.Event(blocking=True)
            done.record(self._stream)
        done.synchronize()  # the network knows nothing of streams
        self.post(message)


class OverGlooPinned(OverGloo):
    """Reaches everybody."""

    name = "Gloo and pinned memory of the host"

    def __init__(self, courier: Courier, waiting: Waiting, gpu: torch.device) -> None:
        super().__init__(courier, waiting)
        self._gpu, self._stream = gpu, torch.cuda.Stream(gpu)

    def outgoing(self, target: int, kind: str) -> Outgoing:
        return PinnedOutgoing(self._courier, target, kind, self._gpu, self._stream)

    def incoming(self, source: int, kind: str) -> Incoming:
        return GlooIncoming(self._courier, self._waiting, source, kind, Reader(pinned=True))
