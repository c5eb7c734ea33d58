"""A tree of tensors as one flat buffer of bytes, and back: what crosses between processes.

    | id, length, more | stamp | description, the first time | tensor | tensor | ...     parts begin at multiples of 64
      16 bytes           28

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
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gapless.errors import TransportError
from gapless.run.ranks.wire.call_stamp import STAMP_SIZE
from gapless.run.ranks.wire.layout import ALIGNMENT, TreeLayout, check, describe, key_of, padded, read_with, signs_of

# Id of the layout, bytes of its description, and where the rest is: here (0), in a place of that name, or in a message
# of so many bytes that follows.
HEADER = struct.Struct("<IIQ")
HEADER_SIZE = HEADER.size + STAMP_SIZE  # and the call that the message belongs to
NO_ID = 0xFFFFFFFF  # of a layout that the other end does not keep
_MOST_LAYOUTS = 4096
_MOST_FREE = 32

_string_at = ctypes.string_at
_memmove = ctypes.memmove


class Message:
    """A buffer in which everything but the numbers is written: tensors are copied into it, or into memory `apart` where
    they go their own way. It may be used again.
    """

    __slots__ = ("_spans", "_stamp", "apart", "buffer", "free", "number", "size", "targets")

    @torch.inference_mode(False)  # the caller's mode must not stick to what is used again
    def __init__(
        self,
        layout: TreeLayout,
        number: int,
        description: bytes,
        *,
        pinned: bool = False,
        apart: Tensor | None = None,
        name: int = 0,
    ) -> None:
        self.number = number  # of the layout
        start = padded(HEADER_SIZE + len(description))
        self.buffer = torch.empty(start + (layout.size if apart is None else 0), dtype=torch.uint8, pin_memory=pinned)
        self.size = start + layout.size
        header = HEADER.pack(number, len(description), name) + bytes(STAMP_SIZE) + description
        _memmove(self.buffer.data_ptr(), header, len(header))
        self._stamp = self.buffer.data_ptr() + HEADER.size
        self.apart = apart
        memory, start = (self.buffer, start) if apart is None else (apart, int(apart.storage_offset()))
        self.targets = [place.target(memory.untyped_storage(), start) for place in layout.places]
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

    def mark(self, stamp: bytes) -> None:
        """It belongs to that call."""
        _memmove(self._stamp, stamp, STAMP_SIZE)

    def sent(self) -> None:
        """Nobody reads it any more."""
        if self.free is not None and len(self.free) < _MOST_FREE:
            self.free.append(self)


class Writer:
    """One end of a channel: makes messages, and knows which layouts the other end knows."""

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._known: dict[Any, tuple[int, TreeLayout, list[Message]]] = {}

    def write(self, tree: Any) -> Message:
        """The message for a tree."""
        tensors, (number, layout, free), description = self.known(tree)
        if free:
            message = free.pop()
        else:
            message = self._message(layout, number, description)
            if not description and message.buffer.numel() == message.size:
                message.free = free
        message.fill(tensors)
        return message

    def known(self, tree: Any) -> tuple[list[Tensor], tuple[int, TreeLayout, list[Message]], bytes]:
        """The tensors of a tree; the number and layout of its kind, and messages that are free; what the other end has
        to be told of it, if it does not know it yet.
        """
        try:
            tensors, key = key_of(tree)
        except RuntimeError:  # one without strides
            check(tree)
            raise
        found = self._known.get(key)
        if found is not None:
            return tensors, found, b""
        described = describe(tree)
        kind: tuple[int, TreeLayout, list[Message]] = (NO_ID, TreeLayout(described), [])
        if len(self._known) < _MOST_LAYOUTS:
            kind = self._known[key] = (len(self._known), *kind[1:])
        return tensors, kind, json.dumps(described).encode()

    def _message(self, layout: TreeLayout, number: int, description: bytes) -> Message:
        """To be filled. Where tensors leave their message there is another one."""
        return Message(layout, number, description, pinned=self._pinned)


class Blank:
    """A buffer for a message to come, in which the tensors are made already if it is one of the kind that was last."""

    __slots__ = ("_expected", "_layout", "_tensors", "buffer")

    def __init__(self, capacity: int, number: int, layout: TreeLayout | None, *, pinned: bool) -> None:
        self.buffer = torch.empty(capacity, dtype=torch.uint8, pin_memory=pinned)
        self._expected, self._layout, self._tensors = b"", layout, []
        if layout is not None and ALIGNMENT + layout.size <= capacity and layout.is_all_views:
            storage = self.buffer.untyped_storage()
            self._expected = HEADER.pack(number, 0, 0)
            self._tensors = [place.read(storage, ALIGNMENT) for place in layout.places]

    def read(self) -> Any:
        """The tree, or None if the message is of another kind."""
        if _string_at(self.buffer.data_ptr(), HEADER.size) != self._expected or self._layout is None:
            return None
        return self._layout.tree(self._tensors)


class Reader:
    """The other end: learns layouts as they come."""

    def __init__(self, *, pinned: bool = False) -> None:
        self.pinned = pinned
        self._known: list[TreeLayout] = []
        self._last: tuple[int, TreeLayout | None] = (0, None)

    def blank(self, capacity: int) -> Blank:
        """For a message to come."""
        return Blank(capacity, *self._last, pinned=self.pinned)

    def read(self, buffer: Tensor) -> Any:
        """The tree of a message."""
        address = buffer.data_ptr()
        number, length, elsewhere = HEADER.unpack(_string_at(address, HEADER.size))
        layout = self.layout(number, _string_at(address + HEADER_SIZE, length))
        data, start = self._data(buffer, padded(HEADER_SIZE + length), elsewhere, layout.size)
        if number != NO_ID and data is buffer:
            self._last = (number, layout)
        storage = data.untyped_storage()
        return layout.tree([place.read(storage, start) for place in layout.places])

    def layout(self, number: int, description: bytes) -> TreeLayout:
        """That of the number; one that comes with a description is learnt."""
        if not description:
            return self._known[number]
        layout = TreeLayout(json.loads(description))
        if number != NO_ID:
            if number != len(self._known):
                raise TransportError(f"layout {number} came where layout {len(self._known)} was to be")
            self._known.append(layout)
        return layout

    def _data(self, buffer: Tensor, start: int, elsewhere: int, size: int) -> tuple[Tensor, int]:
        """The memory with the tensors of a message, and where they begin. Where they leave their message
        there is another one.
        """
        return buffer, start


def _has_bytes(tensor: Tensor) -> bool:
    return tensor.is_cpu and not tensor._is_zerotensor()


def announcement(size: int) -> Tensor:
    """A message that says that one of that size follows: it did not fit where the other end waits."""
    buffer = torch.empty(HEADER_SIZE, dtype=torch.uint8)
    _memmove(buffer.data_ptr(), HEADER.pack(NO_ID, 0, size), HEADER.size)
    return buffer


def announced(buffer: Tensor) -> int:
    """The size of the message that follows, or 0 if this is the message itself."""
    size: int = HEADER.unpack(_string_at(buffer.data_ptr(), HEADER.size))[2]
    return size


def stamp_of(buffer: Tensor) -> bytes:
    """The call that a message belongs to."""
    return _string_at(buffer.data_ptr() + HEADER.size, STAMP_SIZE)
