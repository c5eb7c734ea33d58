"""Where the messages of a process come in, and how others of its host find it.

Pipes have no name in any file system: other processes open them through the process that made them, and whether they
can is tried at the start.
"""

import contextlib
import fcntl
import os
import select
import signal
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gapless.run.ranks.wire.groups import of_each
from gapless.run.ranks.wire.shared_memory import DESCRIPTOR, Segment, file_of, opened

FRAME = struct.Struct("<iiII")  # source, tag, bytes, and whether the message goes on in another frame
_TOKEN = struct.Struct(">IIII")
_CAPACITY = 1 << 20
_AT_ONCE = 1 << 13
_A_MOMENT = 100  # milliseconds
_MOMENTS = 50  # for the last word
_NOTHING = contextlib.nullcontext()
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
        while at + FRAME.size <= end:
            source, tag, size, goes_on = FRAME.unpack_from(data, at)
            start, stop = at + FRAME.size, at + FRAME.size + size
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
            os.write(self.descriptor, FRAME.pack(0, _BROKEN, 0, 0))

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
            self.write([FRAME.pack(0, _BROKEN, 0, 0)])

    def close(self, device: int) -> None:
        """Nothing will come from this device any more."""
        with contextlib.suppress(RuntimeError):
            for _ in range(_MOMENTS):
                if self.write([FRAME.pack(device, _LEFT, 0, 0)]):
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


class Probe:
    """Some memory to be found by others: in another container the same numbers are another process."""

    no_words = (0,) * 5

    def __init__(self) -> None:
        self._segment, token = Segment(0, _TOKEN.size), os.urandom(_TOKEN.size)
        self._segment.memory[: _TOKEN.size] = torch.frombuffer(bytearray(token), dtype=torch.uint8)
        self.words = [self._segment.name & DESCRIPTOR, *_TOKEN.unpack(token)]

    @staticmethod
    def sees(process: int, words: Sequence[int]) -> bool:
        """Whether this process can open another one's, given its words."""
        descriptor, *token = words
        try:
            found = opened(process, descriptor)[: _TOKEN.size]
        except (OSError, ValueError):
            return False
        return found == _TOKEN.pack(*token)


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
    rows = everywhere(group, mine)
    found: dict[int, Outbox] = {}
    for other, (process, descriptor, *words) in enumerate(rows):
        if other != device and inbox is not None and process and Probe.sees(process, words):
            with contextlib.suppress(OSError):
                found[other] = Outbox(process, descriptor)
    seen = everywhere(group, [int(other in found) for other in range(len(rows))])
    for other in [other for other in found if not seen[other][device]]:
        found.pop(other).close(device)
    return inbox, found


def everywhere(group: Any, numbers: list[int]) -> list[list[int]]:
    """Those of all ranks of the group, each of which calls it."""
    return [row.tolist() for row in of_each(group, torch.tensor(numbers))]
