"""Memory that two processes of one host share: a large tensor is written once, and read where it is.

    sender     | flags | data ...         sets the first flag, writes, and names the segment in its message
    receiver     the same memory          sets the second flag when it has opened it, once and for all, and takes down
                                          the first when the last tensor in it is gone

A receiver that has no file descriptor or no room left for the memory takes a copy of the data instead.

The memory has no name in any file system: whoever knows the process and its file descriptor can open it, and when the
processes end, whatever the reason, nothing is left behind. So a sender stays until all that it has sent was opened.
"""

import contextlib
import ctypes
import errno
import functools
import math
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gapless.errors import TransportError
from gapless.run.ranks.wire.layout import ALIGNMENT, TensorPlace, TreeLayout, padded
from gapless.run.ranks.wire.message import HEADER, Message, Reader, Writer

_NUMBER_BITS = 31
_MARK = 1 << 62  # in a header: the tensors are in a segment, of this number and file descriptor
DESCRIPTOR = (1 << _NUMBER_BITS) - 1
_IN_USE, _OPENED = 0, 1  # the flags
_MOST = 32  # segments of a channel: each takes two file descriptors, of which a process may have some thousand
_MFD_NOEXEC_SEAL = 8  # without it some systems refuse
_COPIED = bytes([0, 1])  # what the flags are then
_LARGE = 2 << 10  # bytes; what is smaller is copied more quickly than it is shared
_memmove = ctypes.memmove
_NONE_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # of file descriptors or memory, in this process


class Segment:
    """Some shared memory on the side of its owner."""

    def __init__(self, number: int, capacity: int) -> None:
        self._descriptor = memory_file()
        weakref.finalize(self, os.close, self._descriptor)
        os.ftruncate(self._descriptor, ALIGNMENT + capacity)
        self._map = mmap.mmap(self._descriptor, ALIGNMENT + capacity)
        self.capacity = capacity
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self.name = _MARK | number << _NUMBER_BITS | self._descriptor
        self.messages: dict[int, PipedMessage] = {}  # that were made for it, by the number of their layout

    @property
    def free(self) -> bool:
        return self._map[_IN_USE] == 0

    @property
    def awaited(self) -> bool:
        """Whether somebody will open it who has not yet."""
        return not self.free and self._map[_OPENED] == 0

    def take(self) -> "Segment":
        self._map[_IN_USE] = 1
        return self


def memory_file() -> int:
    """Shared memory without a name; its file descriptor."""
    try:
        return os.memfd_create("gapless", os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError:  # older systems do not know it
        return os.memfd_create("gapless", os.MFD_CLOEXEC)


class Segments:
    """Those of one channel, at the end that sends. There are as many as were ever in use at once, within limits."""

    def __init__(self) -> None:
        self._all: list[Segment] = []
        self._made = 0
        self._capacity = 0

    def take(self, size: int) -> Segment | None:
        """One with room for so many bytes, if there is; the data begin at `ALIGNMENT`."""
        for segment in self._all:
            if segment.capacity >= size and segment.free:
                return segment.take()
        self._all = [segment for segment in self._all if segment.capacity >= size or not segment.free]
        if len(self._all) >= _MOST:
            return None
        self._capacity = max(self._capacity, padded(size + size // 8))
        try:
            segment = Segment(self._made, self._capacity)
        except OSError:  # too many open files, or no memory
            return None
        self._made += 1
        self._all.append(segment)
        return segment.take()

    @property
    def awaited(self) -> bool:
        """Whether some of what was sent has not been opened yet."""
        return any(segment.awaited for segment in self._all)


class Attached:
    """The same memory at the end that receives."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._spare: list[int] = []  # a file descriptor that is there for the moment when no other is
        weakref.finalize(self, _close_all, self._spare)
        self._keep_spare()
        self._maps: dict[int, tuple[mmap.mmap, Callable[[object], None]]] = {}  # and what gives one back
        self._leases: dict[int, weakref.ref[memoryview]] = {}

    def memory(self, name: int, size: int) -> memoryview:
        """A segment's memory, from its name. Its sender may use it again when nothing refers to this any more. If it
        can't be shared, so many bytes of data are copied.
        """
        found = self._maps.get(name)
        if found is None:
            try:
                memory = opened(self._process, name & DESCRIPTOR)
                found = memory, functools.partial(_take_down, memory, os.getpid())
            except (OSError, ValueError) as error:
                if getattr(error, "errno", None) not in _NONE_LEFT:
                    raise _gone(self._process, error) from None
                return self._copied(name & DESCRIPTOR, ALIGNMENT + size)
            self._maps[name] = found
            found[0][_OPENED] = 1
        view = memoryview(found[0])
        self._leases[name] = weakref.ref(view, found[1])
        return view

    def _copied(self, descriptor: int, size: int) -> memoryview:
        """Nothing is shared from here on, so the sender may use it again at once."""
        _close_all(self._spare)
        try:
            place = _aligned(size)
            with _file(self._process, descriptor) as file:
                at = 0
                while at < size:
                    at += os.preadv(file, [place[at:]], at)
                os.pwrite(file, _COPIED, 0)
        except (OSError, RuntimeError, MemoryError) as error:
            if isinstance(error, OSError) and error.errno not in _NONE_LEFT:
                raise _gone(self._process, error) from None
            raise TransportError(
                f"a message of {size} bytes can't be received: this process has no file descriptor or no memory left "
                f"({error}); raise its limits (ulimit -n, ulimit -v), or close what it does not need"
            ) from None
        finally:
            self._keep_spare()
        return place

    def _keep_spare(self) -> None:
        with contextlib.suppress(OSError):
            self._spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def _take_down(memory: mmap.mmap, process: int, _: object) -> None:
    if os.getpid() == process:  # a child that was forked has the same memory, but not the last word
        memory[_IN_USE] = 0


def file_of(process: int, descriptor: int) -> str:
    """By which another process of this host can open it."""
    return f"/proc/{process}/fd/{descriptor}"


@contextlib.contextmanager
def _file(process: int, descriptor: int) -> Iterator[int]:
    file = file_of(process, descriptor)
    if not os.readlink(file).startswith("/memfd:gapless"):
        raise OSError("the number belongs to something else")
    mine = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield mine
    finally:
        os.close(mine)


def opened(process: int, descriptor: int) -> mmap.mmap:
    """Memory that another process has made."""
    with _file(process, descriptor) as mine:
        return mmap.mmap(mine, 0)


def _gone(process: int, error: BaseException) -> RuntimeError:
    return RuntimeError(f"Connection closed: the memory of process {process} can't be opened: {error}")


def _aligned(size: int) -> memoryview:
    """Memory of this process alone, where kernels like it."""
    buffer = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    memory: Any = (ctypes.c_char * buffer.numel()).from_address(buffer.data_ptr())
    memory.owner = buffer
    place = memoryview(memory).cast("B")
    start = -buffer.data_ptr() % ALIGNMENT
    return place[start : start + size]


class PipedMessage(Message):
    """One that can be written into a pipe."""

    __slots__ = ("bytes",)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        place = (ctypes.c_char * self.buffer.numel()).from_address(self.buffer.data_ptr())
        self.bytes = memoryview(place).cast("B")


class SharingWriter(Writer):
    """Writes large tensors into segments, which the other end can open."""

    def __init__(self, segments: Segments) -> None:
        super().__init__()
        self._segments = segments

    def _message(self, layout: TreeLayout, number: int, description: bytes) -> PipedMessage:
        segment = self._segments.take(layout.size) if layout.size >= _LARGE else None
        if segment is None:
            return PipedMessage(layout, number, description)
        message = None if description else segment.messages.get(number)
        if message is None:
            message = PipedMessage(layout, number, description, apart=segment.memory[ALIGNMENT:], name=segment.name)
            if not description:
                segment.messages[number] = message
        return message


class SharingReader(Reader):
    """Reads what came through a pipe, and opens the segments that it names."""

    def __init__(self, attached: Attached) -> None:
        super().__init__()
        self._attached = attached
        self._quick: dict[bytes, tuple[TreeLayout, list[tuple[TensorPlace, int, int]]]] = {}  # by header

    def read_bytes(self, data: bytes) -> Any:
        """The tree of a message, of tensors with memory of their own."""
        quick = self._quick.get(data[: HEADER.size])
        if quick is not None:
            return _made(data, *quick)
        number, length, elsewhere = HEADER.unpack_from(data)
        if elsewhere and not length and self._known[number].is_dense:
            layout = self._known[number]
            memory = self._attached.memory(elsewhere, layout.size)
            return layout.tree([_shared(place, memory) for place in layout.places])
        buffer = torch.empty(len(data), dtype=torch.uint8)
        _memmove(buffer.data_ptr(), data, len(data))
        tree = self.read(buffer)
        number, last = self._last
        if last is not None and last.is_dense:
            self._quick[HEADER.pack(number, 0, 0)] = last, [_span(place) for place in last.places]
        return tree

    def _data(self, buffer: Tensor, start: int, elsewhere: int, size: int) -> tuple[Tensor, int]:
        if not elsewhere:
            return buffer, start
        return torch.frombuffer(self._attached.memory(elsewhere, size), dtype=torch.uint8), ALIGNMENT


def _span(place: TensorPlace) -> tuple[TensorPlace, int, int]:
    """Where the bytes of a dense tensor are in a message without description."""
    start = ALIGNMENT + place.offset * place.dtype.itemsize
    return place, start, start + math.prod(place.shape) * place.dtype.itemsize


def _made(data: bytes, layout: TreeLayout, spans: Sequence[tuple[TensorPlace, int, int]]) -> Any:
    """The tree of a dense message, with memory of its own for every tensor."""
    tensors = []
    for place, start, stop in spans:
        made = torch.empty_strided(place.shape, place.stride, dtype=place.dtype)
        _memmove(made.data_ptr(), data[start:stop], stop - start)
        tensors.append(place.finished(made))
    return layout.tree(tensors)


def _shared(place: TensorPlace, memory: memoryview) -> Tensor:
    """A dense tensor as it is in a segment."""
    dtype, count = place.dtype, math.prod(place.shape)
    at = ALIGNMENT + place.offset * dtype.itemsize
    made = torch.frombuffer(memory, dtype=dtype, count=count, offset=at) if count else torch.empty(0, dtype=dtype)
    return place.finished(made.as_strided(place.shape, place.stride))
