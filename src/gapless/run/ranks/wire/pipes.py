"""Channels between processes of one host: small messages go through a pipe, large tensors through shared memory.

    device of rank 0   --write--\\
                                 >--  inbox of rank 1  --read-->  device of rank 1
    device of rank 2   --write--/

A rank has one inbox, into which all others of its host write. What a pipe takes in one piece arrives in one piece, so a
message is cut into frames of that size, most often one. A device writes itself, and the kernel wakes the device that
waits: nobody else wakes up for a message. If the pipe is full the courier goes on, and the device goes its way.

Pipes and memory have no name in any file system: other processes open them through the process that made them, and
whether they can is tried at the start.
"""

import contextlib
import fcntl
import os
import select
import signal
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from gapless.run.ranks.wire.channel import Carrier, Courier, Incoming, Outgoing, Waiting, tag_of
from gapless.run.ranks.wire.shared_memory import (
    Attached,
    Probe,
    Segments,
    SharingReader,
    SharingWriter,
    file_of,
)

_FRAME = struct.Struct("<iiII")  # source, tag, bytes, and whether the message goes on in another frame
_ROOM = select.PIPE_BUF - _FRAME.size
_CAPACITY = 1 << 20
_AT_ONCE = 1 << 13
_A_MOMENT = 100  # milliseconds
_MOMENTS = 50  # for the last word
_NOTHING = contextlib.nullcontext()
_LARGE = 4 << 20  # bytes that a device does not copy itself if it has something else to do
_LEFT, _BROKEN = 0, 1  # tags of frames that are no messages

Piece = bytes | memoryview


class Inbox:
    """Where messages come in. One thread at a time waits here, as there is one device."""

    def __init__(self) -> None:
        self._end, self.descriptor = os.pipe()
        os.set_blocking(self.descriptor, False)
        with contextlib.suppress(OSError):  # there may be a limit for all pipes of a user
            fcntl.fcntl(self._end, fcntl.F_SETPIPE_SZ, _CAPACITY)
        self._came: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self._begun: dict[tuple[int, int], list[bytes]] = {}
        self._rest = b""
        self.left: set[int] = set()  # devices from which nothing will come any more
        self.broken = False
        self._closing = threading.Lock()

    def place(self, source: int, tag: int) -> deque[bytes]:
        """Where messages of one channel are found."""
        return self._came[source, tag]

    def read(self) -> None:
        """Waits until something has come."""
        if self.broken:
            raise RuntimeError("Connection closed: the inbox of this process")
        data = self._rest + os.read(self._end, _AT_ONCE)
        at, end = 0, len(data)
        while at + _FRAME.size <= end:
            source, tag, size, goes_on = _FRAME.unpack_from(data, at)
            start, stop = at + _FRAME.size, at + _FRAME.size + size
            if stop > end:
                break
            at, piece, channel = stop, data[start:stop], (source, tag)
            if goes_on:
                self._begun.setdefault(channel, []).append(piece)
                continue
            if channel in self._begun:
                piece = b"".join([*self._begun.pop(channel), piece])
            if tag == _LEFT:
                self.left.add(source)
            elif tag == _BROKEN:
                self.broken = True
            else:
                self._came[channel].append(piece)
        self._rest = data[at:]

    def break_off(self) -> None:
        """From any thread: whoever waits here raises."""
        self.broken = True
        with self._closing, contextlib.suppress(OSError):
            os.write(self.descriptor, _FRAME.pack(0, _BROKEN, 0, 0))

    def in_child(self) -> None:
        """A forked child would keep it open when its parent is dead."""
        self.broken = True
        for end in (self._end, self.descriptor):
            with contextlib.suppress(OSError):  # closed before the fork
                os.close(end)

    def close(self) -> None:
        self.broken = True
        with self._closing:
            ends, self._end, self.descriptor = (self._end, self.descriptor), -1, -1
            for end in ends:
                os.close(end)


class Outbox:
    """The inbox of another process."""

    def __init__(self, process: int, descriptor: int) -> None:
        self.process = process
        self._end = os.open(file_of(process, descriptor), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._closing = threading.Lock()
        self._may_kill = signal.getsignal(signal.SIGPIPE) is signal.SIG_DFL  # Python's own default ignores it

    def write(self, pieces: Sequence[Piece]) -> bool:
        """One frame; not if there is no room."""
        try:
            with _without_sigpipe() if self._may_kill else _NOTHING:
                os.writev(self._end, pieces)
        except BlockingIOError:
            return False
        except OSError as error:
            raise RuntimeError(f"Connection closed: the inbox of process {self.process}: {error}") from None
        return True

    def wait(self) -> None:
        """Until there is room, or for a moment."""
        poll = select.poll()
        poll.register(self._end, select.POLLOUT)
        poll.poll(_A_MOMENT)

    @property
    def is_read(self) -> bool:
        """Whether its owner is there."""
        poll = select.poll()
        poll.register(self._end, 0)
        return not poll.poll(0)

    def break_off(self) -> None:
        """From any thread: whoever waits there raises, if there is room for the word; all are told anyway."""
        with self._closing, contextlib.suppress(RuntimeError):
            self.write([_FRAME.pack(0, _BROKEN, 0, 0)])

    def close(self, device: int) -> None:
        """Nothing will come from this device any more."""
        with contextlib.suppress(RuntimeError):
            for _ in range(_MOMENTS):
                if self.write([_FRAME.pack(device, _LEFT, 0, 0)]):
                    break
                self.wait()
        with self._closing:
            end, self._end = self._end, -1
            os.close(end)


@contextlib.contextmanager
def _without_sigpipe() -> Iterator[None]:
    """In this thread, where it would end the process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])
    try:
        yield
    finally:
        signal.sigtimedwait([signal.SIGPIPE], 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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

    def put_now(self, item: Any) -> None:
        if self._handed == self._done:
            self._send(item)
        else:
            super().put(item)

    def _send(self, item: Any) -> None:
        """In the thread of the device, which does not wait."""
        message: Any = self._writer.write(item)
        self.last_size = message.size
        frames = self._frames(message.bytes)
        while frames and self._outbox.write(frames[0]):
            del frames[0]
        if frames:
            self._handed += 1
            self.courier.put((self._finish, [b"".join(each) for each in frames]))
        message.sent()

    def _finish(self, frames: Sequence[bytes]) -> None:
        try:
            for frame in frames:
                self._wait_and_write([frame])
        finally:
            self._done += 1

    def send(self, item: Any) -> None:
        message: Any = self._writer.write(item)
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
                frame = self._frame_of[size] = _FRAME.pack(*self._from, size, 0)
            return [(frame, data)]
        return [
            (_FRAME.pack(*self._from, min(_ROOM, size - at), at + _ROOM < size), data[at : at + _ROOM])
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

    def __init__(self, waiting: Waiting, source: int, kind: str, inbox: Inbox, process: int) -> None:
        super().__init__(waiting, source, kind)
        self._inbox = inbox
        self._came = inbox.place(source, tag_of(kind))
        self._reader = SharingReader(Attached(process))

    def next(self) -> Any:
        came = self._came
        while not came:
            if self.source in self._inbox.left:
                raise RuntimeError(f"Connection closed: by device {self.source}")
            self._inbox.read()
        return self._reader.read_bytes(came.popleft())

    def close(self) -> None:
        del self._reader  # and the memory that it has opened


class ThroughPipes(Carrier):
    """Reaches the devices of `near`, each with the inbox of its process."""

    shares_memory = True

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
        return device in self.near

    def outgoing(self, target: int, kind: str) -> Outgoing:
        return PipeOutgoing(self._courier, self._inbox, self.near[target], self._device, kind)

    def incoming(self, source: int, kind: str) -> Incoming:
        return PipeIncoming(self._waiting, source, kind, self._inbox, self.near[source].process)

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


def find_near(group: Any, device: int) -> tuple[Inbox | None, dict[int, Outbox]]:
    """An inbox for this rank, and those of other ranks of the group, by device: of those that can open what is this
    one's, and this one what is theirs. All ranks of the group call it, also where none of it is allowed.
    """
    inbox: Inbox | None = None
    probe: Probe | None = None
    with contextlib.suppress(OSError, AttributeError):
        probe = Probe()
        inbox = Inbox()
    mine = [0, 0, *Probe.no_words] if probe is None or inbox is None else [os.getpid(), inbox.descriptor, *probe.words]
    rows = _everywhere(group, mine)
    found: dict[int, Outbox] = {}
    for other, (process, descriptor, *words) in enumerate(rows):
        if other != device and inbox is not None and process and Probe.sees(process, words):
            with contextlib.suppress(OSError):
                found[other] = Outbox(process, descriptor)
    seen = _everywhere(group, [int(other in found) for other in range(len(rows))])
    for other in [other for other in found if not seen[other][device]]:
        found.pop(other).close(device)
    return inbox, found


def _everywhere(group: Any, numbers: list[int]) -> list[list[int]]:
    mine = torch.tensor(numbers)
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather([rows], [mine]).wait()
    return [row.tolist() for row in rows]
