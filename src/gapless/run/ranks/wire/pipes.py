"""Channels between processes of one host: small messages go through a pipe, large tensors through shared memory.

    device of rank 0   --write--\\
                                 >--  inbox of rank 1  --read-->  device of rank 1
    device of rank 2   --write--/

A rank has one inbox, into which all others of its host write. What a pipe takes in one piece arrives in one piece, so a
message is cut into frames of that size, most often one. A device writes itself, and the kernel wakes the device that
waits: nobody else wakes up for a message. If the pipe is full, or a tensor takes long to copy, the courier goes on, and
the device goes its way.

Pipes and memory have no name in any file system: other processes open them through the process that made them, and
whether they can is tried at the start.
"""

import select
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gapless.run.ranks.wire.channel import PASSED, Carrier, Courier, Incoming, Outgoing, Waiting, tag_of
from gapless.run.ranks.wire.inbox import FRAME, Inbox, Outbox, Piece, find_near
from gapless.run.ranks.wire.message import HEADER, HEADER_SIZE
from gapless.run.ranks.wire.shared_memory import Attached, Segments, SharingReader, SharingWriter

_ROOM = select.PIPE_BUF - FRAME.size
_LARGE = 512 << 10  # bytes that take longer to copy than it takes to wake the courier, who does it then


class PipeOutgoing(Outgoing):
    """Writes into the inbox of another rank."""

    def __init__(self, courier: Courier, inbox: Inbox, outbox: Outbox, device: int, kind: str) -> None:
        super().__init__(courier)
        self._inbox, self._outbox = inbox, outbox
        self._from = (device, tag_of(kind))
        self._segments = Segments()
        self._writer = SharingWriter(self._segments)
        self._frame_of: dict[int, bytes] = {}  # by the size of a message that fits into one

    def put(self, item: Any) -> None:
        if self._handed == self._done and self.last_size < _LARGE:
            self._send(item)
        else:
            super().put(item)

    put_now = put  # what a device that has nothing to do waits for may come while it copies

    def _send(self, item: Any) -> None:
        """In the thread of the device, which does not wait."""
        message: Any = self._writer.write(item)
        message.mark(self.courier.stamp.now)
        self.last_size = message.size
        self.post(message.bytes)
        message.sent()

    def post(self, data: memoryview) -> None:
        """Leaves at once, unless there is no room or something waits to leave before it."""
        frames = self._frames(data)
        while frames and self._handed == self._done and self._outbox.write(frames[0]):
            del frames[0]
        if frames:
            self._handed += 1
            self.courier.put((self._finish, [b"".join(each) for each in frames]))

    def _finish(self, frames: Sequence[bytes]) -> None:
        try:
            for frame in frames:
                self._wait_and_write([frame])
        finally:
            self._done += 1

    def send(self, item: Any, stamp: bytes | None = None) -> None:
        message: Any = self._writer.write(item)
        message.mark(stamp or self.courier.stamp.now)
        self.last_size = message.size
        for frame in self._frames(message.bytes):
            self._wait_and_write(frame)
        message.sent()

    def _wait_and_write(self, frame: Sequence[Piece]) -> None:
        while not self._outbox.write(frame):
            if self._inbox.broken:
                raise RuntimeError("Connection closed: this process has broken off")
            self._outbox.wait()

    def _frames(self, data: memoryview) -> list[tuple[Piece, Piece]]:
        size = len(data)
        if size <= _ROOM:
            frame = self._frame_of.get(size)
            if frame is None:
                frame = self._frame_of[size] = FRAME.pack(*self._from, size, 0)
            return [(frame, data)]
        return [
            (FRAME.pack(*self._from, min(_ROOM, size - at), at + _ROOM < size), data[at : at + _ROOM])
            for at in range(0, size, _ROOM)
        ]

    def settle(self) -> None:
        """Nothing is kept."""

    def is_over(self) -> bool:
        return not self._segments.awaited or not self._outbox.is_read

    def close(self) -> None:
        self._segments = Segments()
        self._writer = SharingWriter(self._segments)


class PipeIncoming(Incoming):
    """Reads what comes from one rank."""

    def __init__(self, waiting: Waiting, source: int, kind: str, inbox: Inbox, read: Callable[[bytes], Any]) -> None:
        super().__init__(waiting, source, kind)
        self._inbox, self._read = inbox, read
        self._came = inbox.place(source, tag_of(kind))

    def next(self) -> Any:
        came = self._came
        while not came:
            if self.source in self._inbox.left:
                raise RuntimeError(f"Connection closed: by device {self.source}")
            self._inbox.read()
        data = came.popleft()
        self.check(data[HEADER.size : HEADER_SIZE])
        return self._read(data)

    def close(self) -> None:
        del self._read  # and the memory that it has opened


class ThroughPipes(Carrier):
    """Reaches the devices of `near`, each with the inbox of its process."""

    name, shares_memory = "pipes and shared memory", True

    def __init__(
        self, courier: Courier, waiting: Waiting, device: int, inbox: Inbox, near: Mapping[int, Outbox]
    ) -> None:
        self._courier, self._waiting, self._device = courier, waiting, device
        self._inbox, self.near = inbox, dict(near)

    @classmethod
    def found(cls, courier: Courier, waiting: Waiting, device: int) -> "list[ThroughPipes]":
        """All ranks of the courier's group call it. None where it is not allowed."""
        inbox, near = find_near(courier.group, device)
        return [] if inbox is None else [cls(courier, waiting, device, inbox, near)]

    def reaches(self, device: int, kind: str) -> bool:
        return device in self.near and kind != PASSED  # an inbox has one reader

    def outgoing(self, target: int, kind: str) -> Outgoing:
        return PipeOutgoing(self._courier, self._inbox, self.near[target], self._device, kind)

    def incoming(self, source: int, kind: str) -> Incoming:
        reader = SharingReader(Attached(self.near[source].process))
        return PipeIncoming(self._waiting, source, kind, self._inbox, reader.read_bytes)

    def break_off(self) -> None:
        self._inbox.break_off()
        for outbox in self.near.values():
            outbox.break_off()

    def in_child(self) -> None:
        self._inbox.in_child()

    def close(self) -> None:
        for outbox in self.near.values():
            outbox.close(self._device)
        self._inbox.close()
