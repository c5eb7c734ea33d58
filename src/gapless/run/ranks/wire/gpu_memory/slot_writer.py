"""A tree of tensors into a slot in the memory of a GPU. The message itself has everything but their numbers."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapless.errors import TransportError
from gapless.run.ranks.wire.gpu_memory.cuda_driver import Driver
from gapless.run.ranks.wire.gpu_memory.slots import (
    ARRIVED,
    DESCRIPTOR_BITS,
    DONE,
    LEAST_REGION,
    MARK,
    MOST_REGIONS,
    PLACE_BITS,
    QUEUED,
    RELEASED,
    Board,
    Slot,
    Slots,
    Taken,
    at_once,
    capacity_for,
)
from gapless.run.ranks.wire.layout import TreeLayout
from gapless.run.ranks.wire.message import NO_ID, Writer
from gapless.run.ranks.wire.shared_memory import PipedMessage
from gapless.run.ranks.wire.static_shapes import Rehearsal, another_shape

_EMPTY = TreeLayout({"tensors": []})


class _Written(NamedTuple):
    """A message of a step: its layout by number, and the slot that is kept for it."""

    number: int
    slot: Slot


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
            name = MARK | slot.name << DESCRIPTOR_BITS | self._descriptor
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
        names = [number << PLACE_BITS | place for place in range(count)]
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
