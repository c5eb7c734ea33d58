"""A tree of tensors out of a slot in the memory of a GPU, which another process has filled."""

import contextlib
import math
import threading
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapless.errors import TransportError
from gapless.run.ranks.wire.gpu_memory.cuda_driver import Driver
from gapless.run.ranks.wire.gpu_memory.slots import (
    ARRIVED,
    DESCRIPTOR,
    DESCRIPTOR_BITS,
    DONE,
    LEAST_REGION,
    MARK,
    PLACE,
    PLACE_BITS,
    QUEUED,
    RELEASED,
    Board,
)
from gapless.run.ranks.wire.layout import TreeLayout, padded
from gapless.run.ranks.wire.message import HEADER, HEADER_SIZE, NO_ID, Reader
from gapless.run.ranks.wire.shared_memory import opened
from gapless.run.ranks.wire.static_shapes import Rehearsal

_PATIENCE, _A_MOMENT = 0.5, 0.001  # seconds
_NOT_A_NUMBER = 0xFF  # every byte of one, for all kinds of floats


class _Read(NamedTuple):
    """A message of a step: its layout, and the address of its slot."""

    layout: TreeLayout
    source: int


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
                memory = opened(self._process, name & DESCRIPTOR)
            except (OSError, ValueError) as error:
                raise RuntimeError(f"Connection closed: process {self._process} has left: {error}") from None
            self._board = Board(self._driver, memory)
        number = (name ^ MARK) >> DESCRIPTOR_BITS
        region, place = number >> PLACE_BITS, number & PLACE
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
