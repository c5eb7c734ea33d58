"""A tree of tensors through a slot in the memory of a GPU. The message itself has everything but their numbers."""

import contextlib
import math
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapless.errors import TransportError
from gapless.run.ranks.wire.gpu_memory.cuda_driver import Driver
from gapless.run.ranks.wire.gpu_memory.slots import (
    ARRIVED,
    DONE,
    MOST_REGIONS,
    QUEUED,
    RELEASED,
    Board,
    Slot,
    Slots,
    Taken,
    at_once,
    capacity_for,
)
from gapless.run.ranks.wire.layout import TreeLayout, padded
from gapless.run.ranks.wire.message import HEADER, HEADER_SIZE, NO_ID, Reader, Writer
from gapless.run.ranks.wire.shared_memory import PipedMessage, opened
from gapless.run.ranks.wire.static_shapes import Rehearsal, another_shape

LEAST_REGION = 2 << 20  # bytes: what the driver shares is no less
_DESCRIPTOR_BITS, _PLACE_BITS = 31, 16
_DESCRIPTOR, _PLACE = (1 << _DESCRIPTOR_BITS) - 1, (1 << _PLACE_BITS) - 1
_MARK = 1 << 62  # in a header: the tensors are in a slot; its region, its place there, and the board's descriptor
_PATIENCE, _A_MOMENT = 0.5, 0.001  # seconds
_NOT_A_NUMBER = 0xFF  # every byte of one, for all kinds of floats
_EMPTY = TreeLayout({"tensors": []})


class _Written(NamedTuple):
    """A message of a step: its layout by number, and the slot that is kept for it."""

    number: int
    slot: Slot


class _Read(NamedTuple):
    """A message of a step: its layout, and the address of its slot."""

    layout: TreeLayout
    source: int


class SlotWriter(Writer):
    """Copies tensors into slots, on the current stream."""

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self._driver = driver
        driver.enter()
        self._board, self._descriptor = Board.made(driver)
        self._slots = Slots()
        self._regions: list[int] = []
        self._heads: dict[tuple[int, int], PipedMessage] = {}  # by layout and slot: messages without tensors
        self._rehearsal: Rehearsal[_Written] = Rehearsal()

    def begin(self, program: object) -> None:
        """A step starts that is like the first one of its program."""
        self._slots.add([each.slot for each in self._rehearsal.begin(program)])

    def end(self) -> None:
        """It is over."""
        self._rehearsal.end()

    def write_into_slot(self, tree: Any) -> PipedMessage | None:
        """What the other end is to be told, if it does not know."""
        self._driver.enter()
        tensors, (number, layout, _), description = self.known(tree)
        expected = self._rehearsal.next()
        if expected is not None:
            if number != expected.number:
                raise another_shape(tensors)
            self._write(self._slots.again(expected.slot), layout, tensors)
            return None
        taken = self._taken(layout.size)
        if taken is None:
            self._rehearsal.note(None)
            return self._in_host_memory(layout, number, description, tensors)
        slot = taken.slot
        if self._rehearsal.is_on and number != NO_ID:
            self._slots.keep(slot)
            self._rehearsal.note(_Written(number, slot))
        else:
            self._rehearsal.note(None)
        self._write(taken, layout, tensors)
        head = None if description else self._heads.get((number, slot.name))
        if head is None:
            name = _MARK | slot.name << _DESCRIPTOR_BITS | self._descriptor
            head = PipedMessage(_EMPTY, number, description, name=name)
            if not description:
                self._heads[number, slot.name] = head
        return head

    def _write(self, taken: Taken, layout: TreeLayout, tensors: Sequence[Tensor]) -> None:
        stream = self._driver.current_stream()
        if taken.after:
            self._driver.wait(self._board.device_address + DONE, taken.after, stream)
        self._copy(layout, tensors, taken.slot.address, stream)
        self._driver.write(self._board.device_address + ARRIVED, self._slots.sent, stream)

    def _copy(self, layout: TreeLayout, tensors: Sequence[Tensor], target: int, stream: int) -> None:
        if layout.is_dense and all(map(_has_bytes, tensors)):
            for tensor, place in zip(tensors, layout.places, strict=True):
                size = tensor.numel() * place.dtype.itemsize
                if size:
                    self._driver.copy(target + place.offset * place.dtype.itemsize, tensor.data_ptr(), size, stream)
            return
        with torch.inference_mode(False):
            packed = torch.empty(layout.size, dtype=torch.uint8, device=self._driver.gpu)
        PipedMessage(layout, 0, b"", apart=packed).fill(tensors)
        self._driver.copy(target, packed.data_ptr(), layout.size, stream)

    def _in_host_memory(
        self, layout: TreeLayout, number: int, description: bytes, tensors: Sequence[Tensor]
    ) -> PipedMessage:
        """Nothing to copy, or no memory left on the GPU: the tensors go with the message, and are waited for."""
        message = PipedMessage(layout, number, description)
        message.fill(tensors)
        if layout.size:
            torch.cuda.current_stream(self._driver.gpu).synchronize()
        return message

    def _taken(self, size: int) -> Taken | None:
        if not size:
            return None
        capacity = capacity_for(size)
        counts = self._board.number(QUEUED), self._board.number(DONE)
        taken = self._slots.take(size, at_once(capacity), *counts)
        if taken is None and len(self._regions) < MOST_REGIONS:
            self._add_region(capacity)
            taken = self._slots.take(size, at_once(capacity), *counts)
        return taken

    def _add_region(self, capacity: int) -> None:
        count = max(1, LEAST_REGION // capacity)
        try:
            address = self._driver.allocate(max(LEAST_REGION, capacity * count))
        except TransportError:  # no memory left: whoever sends waits for the host's
            return
        number = len(self._regions)
        self._regions.append(address)
        self._board.announce(number, self._driver.export(address), capacity)
        names = [number << _PLACE_BITS | place for place in range(count)]
        self._slots.add([Slot(name, address + place * capacity, capacity) for place, name in enumerate(names)])

    @property
    def is_over(self) -> bool:
        """Whether all was copied out."""
        return self._board.number(DONE) >= self._slots.sent

    def release(self) -> None:
        """No stream of this process waits for the other end any more."""
        self.stay_released()

    def stay_released(self) -> None:
        """What the other end has queued may still count."""
        self._board.set(DONE, RELEASED)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError, TransportError):  # the GPU may have failed
            self._driver.enter()
            torch.cuda.synchronize(self._driver.gpu)
            for address in self._regions:
                self._driver.free(address)
            self._board.close()
        os.close(self._descriptor)


def _has_bytes(tensor: Tensor) -> bool:
    return tensor.is_cuda and not tensor._is_zerotensor()


class SlotReader(Reader):
    """Copies tensors out of slots, on the current stream."""

    def __init__(self, driver: Driver, process: int, rescue: torch.cuda.Stream) -> None:
        super().__init__()
        self._driver, self._process, self._rescue = driver, process, rescue
        self._board: Board | None = None
        self._regions: dict[int, tuple[int, int]] = {}  # address, and bytes of a slot
        self._count = 0
        self._released = False
        self._releasing = threading.Lock()
        self._rehearsal: Rehearsal[_Read] = Rehearsal()

    def begin(self, program: object) -> None:
        """A step starts that is like the first one of its program."""
        self._rehearsal.begin(program)

    def end(self) -> None:
        """It is over."""
        self._rehearsal.end()

    def read_ahead(self) -> Any:
        """The tree of the next message without a word of it, on the GPU once the current stream gets there; None if
        there has to be a word.
        """
        expected = self._rehearsal.next()
        if expected is None:
            return None
        self._driver.enter()
        return self._read(*expected)

    def read_bytes(self, data: bytes) -> Any:
        """The tree of a message, on the GPU once the current stream gets there."""
        number, length, name = HEADER.unpack_from(data)
        layout = self.layout(number, data[HEADER_SIZE : HEADER_SIZE + length])
        if not name:
            self._rehearsal.note(None)
            return self._from_host_memory(layout, data[padded(HEADER_SIZE + length) :])
        self._driver.enter()
        source = self._slot(name)
        self._rehearsal.note(None if number == NO_ID else _Read(layout, source))
        return self._read(layout, source)

    def _read(self, layout: TreeLayout, source: int) -> Any:
        stream, board = self._driver.current_stream(), self._board
        assert board is not None
        with self._releasing:
            if self._released:  # what is waited for may never come
                raise RuntimeError("Connection closed: this process has broken off")
            self._count += 1
            self._driver.wait(board.device_address + ARRIVED, self._count, stream)
        tree = layout.tree(self._copied(layout, source, stream))
        self._driver.write(board.device_address + DONE, self._count, stream)
        board.set(QUEUED, self._count)
        return tree

    def _copied(self, layout: TreeLayout, source: int, stream: int) -> list[Tensor]:
        gpu, made = self._driver.gpu, []
        if not layout.is_dense:
            packed = torch.empty(layout.size, dtype=torch.uint8, device=gpu)
            self._driver.copy(packed.data_ptr(), source, layout.size, stream)
            storage = packed.untyped_storage()
            return [place.read(storage, 0) for place in layout.places]
        for place in layout.places:
            tensor = torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device=gpu)
            size = math.prod(place.shape) * place.dtype.itemsize
            if size:
                at = source + place.offset * place.dtype.itemsize
                self._driver.copy(tensor.data_ptr(), at, size, stream)
            made.append(place.finished(tensor))
        return made

    def _from_host_memory(self, layout: TreeLayout, data: bytes) -> Any:
        buffer = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8).to(self._driver.gpu)
        storage = buffer.untyped_storage()
        return layout.tree([place.read(storage, 0) for place in layout.places])

    def _slot(self, name: int) -> int:
        if self._board is None:
            try:
                memory = opened(self._process, name & _DESCRIPTOR)
            except (OSError, ValueError) as error:
                raise RuntimeError(f"Connection closed: process {self._process} has left: {error}") from None
            self._board = Board(self._driver, memory)
        number = (name ^ _MARK) >> _DESCRIPTOR_BITS
        region, place = number >> _PLACE_BITS, number & _PLACE
        if region not in self._regions:
            handle, capacity = self._board.region(region)
            self._regions[region] = self._driver.open(handle), capacity
        address, capacity = self._regions[region]
        return address + place * capacity

    def release(self) -> None:
        """From any thread: no stream of this process waits for the other end any more. It would go on with what is in
        the slots, so they are filled with NaN.
        """
        self._released = True
        if self._releasing.acquire(timeout=_PATIENCE):  # a wait that is being queued counts, but may find no room
            self._releasing.release()
        board = self._board
        if board is None or board.number(ARRIVED) >= self._count:
            return
        with contextlib.suppress(RuntimeError, TransportError):  # the GPU may have failed
            self._driver.enter()
            for address, capacity in list(self._regions.values()):
                size = max(1, LEAST_REGION // capacity) * capacity
                self._driver.fill(address, _NOT_A_NUMBER, size, self._rescue.cuda_stream)
            deadline = time.monotonic() + _PATIENCE
            while not self._rescue.query() and time.monotonic() < deadline:
                time.sleep(_A_MOMENT)
        self.stay_released()

    def stay_released(self) -> None:
        """What the other end has queued may still count."""
        if (board := self._board) is not None and self._released:
            board.set(ARRIVED, RELEASED)

    def close(self) -> None:
        if (board := self._board) is not None:
            with contextlib.suppress(RuntimeError, TransportError):  # the GPU may have failed
                self._driver.enter()
                torch.cuda.synchronize(self._driver.gpu)
                for address, _ in self._regions.values():
                    self._driver.close(address)
                board.close()
            self._board = None
