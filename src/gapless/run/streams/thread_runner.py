"""The devices of a flow as threads of one process, and what is between them: queues that have no end."""

import queue
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from gapless.run.lanes import CpuLane, Lane
from gapless.run.streams.stage_replicas import NoReplicas, StageReplicas
from gapless.run.streams.stream_device import END, End, Fed, StreamDevice
from gapless.run.streams.stream_runner import Said, Stopped, StreamRunner
from gapless.run.team import Team
from gapless.run.thread_state import CallerState


class Queues:
    """Between all devices: forwards, backwards, and what each gets from the caller."""

    def __init__(self, devices: int, said: Said) -> None:
        self.said = said
        self.forwards: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(devices)]
        self.backwards: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(devices)]
        self.parts: list[queue.SimpleQueue[Fed | End]] = [queue.SimpleQueue() for _ in range(devices)]

    def clear(self) -> None:
        """Nothing is under way, so whatever is here is of no use."""
        for each in (*self.forwards, *self.backwards, *self.parts):
            while not each.empty():
                each.get()


class ThreadNeighbours:
    """As one device sees them."""

    def __init__(self, queues: Queues, device: int, lane: Lane, *, one_memory: bool) -> None:
        """`one_memory`: what is made is where it is needed, as in `Program`."""
        self._queues, self._device, self._lane = queues, device, lane
        self._devices = len(queues.forwards)
        self._one_memory = one_memory

    def next_part(self) -> Fed | End:
        part = self._queues.parts[self._device].get()
        if self._one_memory or isinstance(part, End):
            return part
        return part.unpacked(self._lane, first=self._device == 0, last=self._device == self._devices - 1)

    def next_activation(self) -> Any:
        return self._unpacked(self._queues.forwards[self._device].get())

    def next_gradient(self) -> Any:
        return self._unpacked(self._queues.backwards[self._device].get())

    def _unpacked(self, parcel: Any) -> Any:
        return parcel if self._one_memory or parcel is END else self._lane.unpack(parcel)

    def _packed(self, tree: Any) -> Any:
        return tree if self._one_memory or tree is END else self._lane.pack(tree)

    def hand_on(self, activation: Any) -> None:
        if self._device == self._devices - 1:
            self._queues.said.put((-1, None))  # nothing more will be said
            return
        self._queues.forwards[self._device + 1].put(self._packed(activation))

    def hand_back(self, gradient: Any) -> None:
        self._queues.backwards[self._device - 1].put(self._packed(gradient))

    def say(self, minibatch: int, loss: Tensor) -> None:
        self._queues.said.put((minibatch, loss))

    def check(self, minibatch: int) -> None:
        """There is one caller."""

    def settle(self) -> None:
        """What still comes is dropped before the next start."""


class ThreadRunner(StreamRunner):
    """Runs devices of a flow, one thread each."""

    def __init__(self, lanes: Sequence[Lane], team: Team) -> None:
        super().__init__(lanes, team)
        self._queues = Queues(len(lanes), self.said)
        self._devices: Sequence[StreamDevice] = ()

    def neighbours(self, device: int) -> ThreadNeighbours:
        """Of that device."""
        one_memory = all(isinstance(lane, CpuLane) for lane in self._lanes)
        return ThreadNeighbours(self._queues, device, self._lanes[device], one_memory=one_memory)

    def replicas(self, parameters: Sequence[nn.Parameter]) -> StageReplicas:
        """No stage has replicas here."""
        return NoReplicas()

    def compare(self, minibatch: int, batch: Any) -> None:
        """There is one caller."""

    def feed(self, part: Fed | End) -> None:
        for each in self._queues.parts:
            each.put(part)

    def start(self, devices: Sequence[StreamDevice]) -> None:
        self._queues.clear()
        self._devices, state = devices, CallerState()
        self._begin(partial(self._run, *each, state) for each in zip(devices, self._lanes, strict=True))

    def _run(self, device: StreamDevice, lane: Lane, state: CallerState) -> None:
        try:
            with lane.entered(), state.entered():
                device.run()
        finally:
            if device.failure is not None:
                self.said.put((-1, None))

    def finish(self, fed: int, why: str) -> Sequence[Stopped]:
        self._end()
        return self.broken_off()

    def broken_off(self) -> Sequence[Stopped]:
        """How far each stage has come."""
        return [Stopped(each.rule.stage, 0, each.updated, is_torn=each.is_torn) for each in self._devices]
