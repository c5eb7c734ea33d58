"""Channels in the memory of GPUs: between processes of one host that share a GPU, or whose GPUs reach each other.

    sender's stream     F(0)   copy into a slot   arrived = n
    hosts                      \\-> which slot, which layout, through a pipe
    receiver's stream          wait for arrived >= n   copy out   done = n   F(1)

Neither host waits for a GPU. The slots are the sender's, outside of torch's memory, and opened by the receiver once.
The numbers lie in memory of the host that both processes and both GPUs see (`Board`): a process can change those that
its streams wait for, and so release itself when the other one is gone. What it had not got by then is filled with NaN
before, so that nobody trains on with what is not there.

Whatever a device queues it queues in its own order, in one thread: a send comes before the wait for the next receive.
So it does not matter which streams share a queue of the GPU.
"""

import os
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from gapless.errors import TransportError
from gapless.run.ranks.wire.channel import DIRECT, Carrier, Courier, Incoming, Outgoing, Waiting
from gapless.run.ranks.wire.gpu_memory.cuda_driver import Driver
from gapless.run.ranks.wire.gpu_memory.slot_reader import SlotReader
from gapless.run.ranks.wire.gpu_memory.slot_writer import SlotWriter
from gapless.run.ranks.wire.gpu_memory.slots import LEAST_REGION
from gapless.run.ranks.wire.inbox import Inbox, Outbox, everywhere, find_near
from gapless.run.ranks.wire.pipes import PipeIncoming, PipeOutgoing
from gapless.schedule.routes import Channel

_A_MOMENT = 0.001  # seconds
_TOKEN = struct.Struct("<2q")
_WORDS_OF_HANDLE = struct.Struct("<8q")


class SlotOutgoing(PipeOutgoing):
    """Copies in the thread of the device, so that nothing it does next comes before."""

    def __init__(self, courier: Courier, inbox: Inbox, outbox: Outbox, device: int, kind: str, driver: Driver) -> None:
        super().__init__(courier, inbox, outbox, device, kind)
        self._slot_writer: SlotWriter | None = SlotWriter(driver)

    def put(self, item: Any) -> None:
        assert self._slot_writer is not None
        message = self._slot_writer.write_into_slot(item)
        if message is not None:
            message.mark(self.courier.stamp.now)
            self.post(message.bytes)

    put_now = put

    def begin(self, program: object) -> None:
        assert self._slot_writer is not None
        self._slot_writer.begin(program)

    def end(self) -> None:
        assert self._slot_writer is not None
        self._slot_writer.end()

    def is_over(self) -> bool:
        return self._slot_writer is None or self._slot_writer.is_over or not self._outbox.is_read

    def release(self) -> None:
        """From any thread."""
        if (writer := self._slot_writer) is not None:
            writer.release()

    def stay_released(self) -> None:
        if (writer := self._slot_writer) is not None:
            writer.stay_released()

    def close(self) -> None:
        if self._slot_writer is not None:
            self._slot_writer.close()  # which waits for the GPU
            self._slot_writer = None


class SlotIncoming(PipeIncoming):
    """Reads what comes from one rank."""

    def __init__(self, waiting: Waiting, source: int, kind: str, inbox: Inbox, reader: SlotReader) -> None:
        super().__init__(waiting, source, kind, inbox, reader.read_bytes)
        self._slot_reader = reader

    def next(self) -> Any:
        tree = self._slot_reader.read_ahead()
        return super().next() if tree is None else tree

    def begin(self, program: object) -> None:
        self._slot_reader.begin(program)

    def end(self) -> None:
        self._slot_reader.end()

    def release(self) -> None:
        """From any thread."""
        self._slot_reader.release()

    def stay_released(self) -> None:
        self._slot_reader.stay_released()

    def close(self) -> None:
        self._slot_reader.close()


class OverGpuMemory(Carrier):
    """Reaches the devices of this host whose processes could open this one's memory, and it theirs."""

    name = "the memory of their GPUs"
    shares_memory = in_stream = True

    def __init__(
        self,
        courier: Courier,
        waiting: Waiting,
        device: int,
        inbox: Inbox,
        near: dict[int, Outbox],
        reach: Sequence[Sequence[int]],
        driver: Driver,
    ) -> None:
        self._courier, self._waiting, self._device = courier, waiting, device
        self._inbox, self._near, self._reach, self._driver = inbox, near, reach, driver
        self._rescue = torch.cuda.Stream(driver.gpu, priority=-1)
        self._ends: list[SlotOutgoing | SlotIncoming] = []
        self._holding: threading.Thread | None = None

    @classmethod
    def found(
        cls, courier: Courier, waiting: Waiting, device: int, gpu: torch.device, failures: list[str]
    ) -> "list[OverGpuMemory]":
        """All ranks of the courier's group call it. None where nobody is reached; `failures` then tells why."""
        inbox, near = find_near(courier.group, device)
        driver, reach = _reach(courier.group, device, near, gpu, failures)
        for other in [other for other in near if not reach[device][other]]:
            near.pop(other).close(device)
        if inbox is None or driver is None or not any(map(any, reach)):
            if inbox is not None:
                inbox.close()
            return []
        return [cls(courier, waiting, device, inbox, near, reach, driver)]

    def carries(self, channel: Channel) -> bool:
        source, target, kind = channel
        return kind in DIRECT and bool(self._reach[source][target])

    def reaches(self, device: int, kind: str) -> bool:
        return kind in DIRECT and device in self._near

    def outgoing(self, target: int, kind: str) -> Outgoing:
        made = SlotOutgoing(self._courier, self._inbox, self._near[target], self._device, kind, self._driver)
        self._ends.append(made)
        return made

    def incoming(self, source: int, kind: str) -> Incoming:
        reader = SlotReader(self._driver, self._near[source].process, self._rescue)
        made = SlotIncoming(self._waiting, source, kind, self._inbox, reader)
        self._ends.append(made)
        return made

    def break_off(self) -> None:
        self._inbox.break_off()
        for outbox in self._near.values():
            outbox.break_off()
        for end in list(self._ends):
            end.release()
        if self._holding is None:
            self._holding = threading.Thread(target=self._hold, name="gapless holds waits released", daemon=True)
            self._holding.start()

    def _hold(self) -> None:
        """Until all is closed: streams of other processes, themselves released, go on to count in the same places, and
        streams of this one would wait again.
        """
        while self._ends:
            for end in list(self._ends):
                end.stay_released()
            time.sleep(_A_MOMENT)

    def in_child(self) -> None:
        self._inbox.in_child()

    def close(self) -> None:
        self._ends.clear()
        for outbox in self._near.values():
            outbox.close(self._device)
        self._inbox.close()


def _reach(
    group: Any, device: int, near: dict[int, Outbox], gpu: torch.device, failures: list[str]
) -> tuple[Driver | None, list[list[int]]]:
    """Whether each two devices can open each other's memory, as tried. All ranks of the group call it."""
    token, driver, address = os.urandom(_TOKEN.size), None, 0
    mine = [0] * (1 + 2 + 8)
    try:
        driver = Driver(gpu)
        driver.enter()
        address = driver.allocate(LEAST_REGION)
        driver.put(address, token)
        mine = [1, *_TOKEN.unpack(token), *_WORDS_OF_HANDLE.unpack(driver.export(address))]
    except TransportError as error:
        driver = None
        failures.append(str(error))
    rows = everywhere(group, mine)
    seen = [0] * len(rows)
    for other in near:
        is_there, first, second, *handle = rows[other]
        if driver is not None and is_there:
            try:
                seen[other] = int(_sees(driver, _WORDS_OF_HANDLE.pack(*handle), _TOKEN.pack(first, second)))
            except TransportError as error:
                failures.append(str(error))
    reach = everywhere(group, seen)
    if driver is not None and address:
        driver.free(address)
    return driver, [[both & reach[b][a] for b, both in enumerate(row)] for a, row in enumerate(reach)]


def _sees(driver: Driver, handle: bytes, token: bytes) -> bool:
    address = driver.open(handle)
    found = driver.read_back(address, len(token))
    driver.close(address)
    return found == token
