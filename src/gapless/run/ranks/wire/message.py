"""A tree of tensors as one flat buffer of bytes, and back: what crosses between processes.

    | id, length, more | description, the first time | tensor | tensor | ...       every part begins at a multiple of 64
      16 bytes

The layout of a tree is everything but its numbers: structure, constants, dtypes, shapes, strides, which tensors want a
gradient, and which are conjugates. It is described in JSON the first time it is sent; both ends keep it, and later
messages name it by its id. Nothing is pickled. A tensor comes out with the strides it went in with, since kernels may
sum in another order otherwise; only elements that are there travel, an expanded dimension is not sent twice. What comes
out are views of the buffer.
"""

import ctypes
import itertools
import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gapless.errors import TransportError
from gapless.run.ranks.wire.layout import ALIGNMENT, Layout, check, describe, key_of, padded, read_with, signs_of
from gapless.run.ranks.wire.segments import Attached, Segment, Segments

# Id of the layout, bytes of its description, and where the rest is: here (0), in a segment of shared memory (its name),
# or in a message of so many bytes that follows.
_HEADER = struct.Struct("<IIQ")
HEADER_SIZE = _HEADER.size
_NO_ID = 0xFFFFFFFF
_MOST_LAYOUTS = 4096
_MOST_FREE = 32
_LARGE = 2 << 10  # what is smaller is copied more quickly than it is shared

_string_at = ctypes.string_at
_memmove = ctypes.memmove


class Message:
    """A buffer in which everything but the numbers is written: tensors are copied into it, into `data` where they go
    their own way, or into shared memory. It may be used again.
    """

    __slots__ = ("_spans", "buffer", "bytes", "data", "free", "size", "targets")

    def __init__(
        self,
        layout: Layout,
        number: int,
        description: bytes,
        *,
        pinned: bool = False,
        device: torch.device | None = None,
        segment: Segment | None = None,
    ) -> None:
        start = padded(HEADER_SIZE + len(description))
        apart = device is not None or segment is not None
        self.buffer = torch.empty(start + (0 if apart else layout.size), dtype=torch.uint8, pin_memory=pinned)
        place = (ctypes.c_char * self.buffer.numel()).from_address(self.buffer.data_ptr())
        self.bytes = memoryview(place).cast("B")
        self.data = None if device is None else torch.empty(layout.size, dtype=torch.uint8, device=device)
        self.size = start + layout.size
        header = _HEADER.pack(number, len(description), 0 if segment is None else segment.name) + description
        _memmove(self.buffer.data_ptr(), header, len(header))
        memory, start = (self.buffer, start) if self.data is None else (self.data, 0)
        if segment is not None:
            memory, start = segment.memory, ALIGNMENT
        self.targets = [slot.target(memory.untyped_storage(), start) for slot in layout.slots]
        # Where the bytes of each tensor go, if they are the same ones in the same order.
        self._spans: list[tuple[int, int]] | None = None
        if layout.is_dense and memory.is_cpu:
            self._spans = [(target.data_ptr(), target.numel() * target.itemsize) for target in self.targets]
        self.free: list[Message] | None = None  # where it goes when it has been sent

    def fill(self, tensors: Sequence[Tensor]) -> None:
        spans = self._spans or itertools.repeat(None)
        for tensor, target, span in zip(tensors, self.targets, spans, strict=False):
            if span is not None and _has_bytes(tensor):
                _memmove(span[0], tensor.data_ptr(), span[1])
                continue
            # What is sent has no history: the buffer is used again, and would keep that of all it ever held.
            tensor = tensor.detach() if tensor.requires_grad else tensor
            if signs := signs_of(tensor):
                tensor = read_with(signs, tensor)  # the bytes as they are
            if tensor.shape != target.shape:  # expanded: once is enough
                tensor = tensor.as_strided(target.shape, tensor.stride())
            target.copy_(tensor, non_blocking=True)

    def sent(self) -> None:
        """Nobody reads it any more."""
        if self.free is not None and len(self.free) < _MOST_FREE:
            self.free.append(self)


class Writer:
    """One end of a channel: makes messages, and knows which layouts the other end knows."""

    def __init__(
        self, *, pinned: bool = False, device: torch.device | None = None, segments: Segments | None = None
    ) -> None:
        """Tensors are written into the message, `pinned` or not, or into memory of their own on a device; large ones
        into `segments`, if the other end can open them.
        """
        self._pinned, self._device, self._segments = pinned, device, segments
        self._known: dict[Any, tuple[int, Layout, list[Message]]] = {}

    def write(self, tree: Any) -> Message:
        """The message for a tree."""
        try:
            tensors, key = key_of(tree)
        except RuntimeError:  # one without strides
            check(tree)
            raise
        found = self._known.get(key)
        if found is not None:
            number, layout, free = found
            if free:
                message = free.pop()
            else:
                message = self._message(layout, number, b"")
                message.free = free if message.buffer.numel() == message.size else None
        else:
            message = self._first(tree, key)
        message.fill(tensors)
        return message

    def _first(self, tree: Any, key: Any) -> Message:
        described = describe(tree)
        layout, number = Layout(described), _NO_ID
        if len(self._known) < _MOST_LAYOUTS:
            number = len(self._known)
            self._known[key] = (number, layout, [])
        return self._message(layout, number, json.dumps(described).encode())

    def _message(self, layout: Layout, number: int, description: bytes) -> Message:
        if self._segments is not None and layout.size >= _LARGE:
            segment = self._segments.take(layout.size)
            if segment is not None:
                return self._shared(segment, layout, number, description)
        return self._new(layout, number, description, pinned=self._pinned, device=self._device)

    def _shared(self, segment: Segment, layout: Layout, number: int, description: bytes) -> Message:
        message: Message | None = None if description else segment.messages.get(number)
        if message is None:
            message = self._new(layout, number, description, segment=segment)
            if not description:
                segment.messages[number] = message
        return message

    @staticmethod
    def _new(*args: Any, **options: Any) -> Message:
        with torch.inference_mode(False):  # the caller's mode must not stick to what is used again
            return Message(*args, **options)


class Blank:
    """A buffer for a message to come, in which the tensors are made already if it is one of the kind that was last."""

    __slots__ = ("_expected", "_layout", "_tensors", "buffer")

    def __init__(self, capacity: int, number: int, layout: Layout | None, *, pinned: bool) -> None:
        self.buffer = torch.empty(capacity, dtype=torch.uint8, pin_memory=pinned)
        self._expected, self._layout, self._tensors = b"", layout, []
        if layout is not None and ALIGNMENT + layout.size <= capacity and layout.is_all_views:
            storage = self.buffer.untyped_storage()
            self._expected = _HEADER.pack(number, 0, 0)
            self._tensors = [slot.read(storage, ALIGNMENT) for slot in layout.slots]

    def read(self) -> Any:
        """The tree, or None if the message is of another kind."""
        if _string_at(self.buffer.data_ptr(), HEADER_SIZE) != self._expected or self._layout is None:
            return None
        return self._layout.tree(self._tensors)


class Reader:
    """The other end: learns layouts as they come."""

    def __init__(
        self,
        *,
        pinned: bool = False,
        fetch: Callable[[int], Tensor] | None = None,
        attached: Attached | None = None,
    ) -> None:
        """`fetch` brings so many bytes of tensors that come their own way, `attached` those in shared memory."""
        self._pinned, self._fetch, self._attached = pinned, fetch, attached
        self._known: list[Layout] = []
        self._last: tuple[int, Layout | None] = (0, None)
        self._quick: dict[bytes, Layout] = {}  # by header

    def blank(self, capacity: int) -> Blank:
        """For a message to come."""
        return Blank(capacity, *self._last, pinned=self._pinned)

    def read_bytes(self, data: bytes) -> Any:
        """The tree of a message, of tensors with memory of their own."""
        layout = self._quick.get(data[:HEADER_SIZE])
        if layout is not None:
            return layout.made(data)
        number, length, elsewhere = _HEADER.unpack_from(data)
        if elsewhere and not length and self._known[number].is_dense:
            assert self._attached is not None
            layout = self._known[number]
            memory = self._attached.memory(elsewhere, layout.size)
            return layout.tree([slot.shared(memory, ALIGNMENT) for slot in layout.slots])
        buffer = torch.empty(len(data), dtype=torch.uint8)
        _memmove(buffer.data_ptr(), data, len(data))
        tree = self.read(buffer)
        number, layout = self._last
        if layout is not None and layout.is_dense:
            self._quick[_HEADER.pack(number, 0, 0)] = layout
        return tree

    def read(self, buffer: Tensor) -> Any:
        """The tree of a message."""
        address = buffer.data_ptr()
        number, length, elsewhere = _HEADER.unpack(_string_at(address, HEADER_SIZE))
        start = ALIGNMENT
        if length:
            layout = Layout(json.loads(_string_at(address + HEADER_SIZE, length)))
            start = padded(HEADER_SIZE + length)
            if number != _NO_ID:
                if number != len(self._known):
                    raise TransportError(f"layout {number} came where layout {len(self._known)} was to be")
                self._known.append(layout)
        else:
            layout = self._known[number]
        if number != _NO_ID and self._fetch is None and not elsewhere:
            self._last = (number, layout)
        if elsewhere:
            assert self._attached is not None
            buffer, start = (
                torch.frombuffer(self._attached.memory(elsewhere, layout.size), dtype=torch.uint8),
                ALIGNMENT,
            )
        elif self._fetch is not None:
            buffer, start = self._fetch(layout.size), 0
        storage = buffer.untyped_storage()
        return layout.tree([slot.read(storage, start) for slot in layout.slots])


def _has_bytes(tensor: Tensor) -> bool:
    return tensor.is_cpu and not tensor._is_zerotensor()


def announcement(size: int) -> Tensor:
    """A message that says that one of that size follows: it did not fit where the other end waits."""
    buffer = torch.empty(HEADER_SIZE, dtype=torch.uint8)
    _memmove(buffer.data_ptr(), _HEADER.pack(_NO_ID, 0, size), HEADER_SIZE)
    return buffer


def announced(buffer: Tensor) -> int:
    """The size of the message that follows, or 0 if this is the message itself."""
    size: int = _HEADER.unpack(_string_at(buffer.data_ptr(), HEADER_SIZE))[2]
    return size
