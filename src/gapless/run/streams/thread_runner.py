"""The devices of a flow as threads of one process, and what is between them: queues that have no end."""

import queue
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gapless.run.lanes import CpuLane, CudaLane, Lane, Parcel
from gapless.run.streams.stage_replicas import NoReplicas, StageReplicas
from gapless.run.streams.stream_device import END, End, Fed, StreamDevice
from gapless.run.streams.stream_runner import Said, Stopped
from gapless.run.team import Team
from gapless.run.thread_state import CallerState


class Queues:
    """Between all devices: forwards, backwards, and what each gets from the caller."""

    def __init__(self, devices: int) -> None:
        self.forwards: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(devices)]
        self.backwards: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(devices)]
        self.parts: list[queue.SimpleQueue[Fed | End]] = [queue.SimpleQueue() for _ in range(devices)]
        self.said: Said = queue.SimpleQueue()

    def feed(self, part: Fed | End) -> None:
        """To all devices."""
        for each in self.parts:
            each.put(part)

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
        if isinstance(part, End):
            return part
        if self._one_memory:
            return part
        inputs = self._borrowed(part.inputs, part) if self._device == 0 else None
        target = self._borrowed(part.target, part) if self._device == self._devices - 1 else None
        return Fed(inputs, target, part.weight)

    def _borrowed(self, tree: Any, part: Fed) -> Any:
        return self._lane.unpack(Parcel(tree, part.event, borrowed=True))

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
        if loss.is_cuda:  # the caller's stream knows nothing of this one; the update that comes next waits as well
            torch.cuda.current_stream(loss.device).synchronize()
        self._queues.said.put((minibatch, loss))

    def check(self, minibatch: int) -> None:
        """There is one caller."""

    def settle(self) -> None:
        """What still comes is dropped before the next start."""


class ThreadRunner:
    """Runs devices of a flow, one thread each."""

    def __init__(self, lanes: Sequence[Lane], team: Team) -> None:
        self._lanes, self._team = lanes, team
        self._queues = Queues(len(lanes))
        self.said = self._queues.said
        self.feed = self._queues.feed
        self._devices: Sequence[StreamDevice] = ()

    def neighbours(self, device: int) -> ThreadNeighbours:
        """Of that device."""
        one_memory = all(isinstance(lane, CpuLane) for lane in self._lanes)
        return ThreadNeighbours(self._queues, device, self._lanes[device], one_memory=one_memory)

    def replicas(self, parameters: Sequence[nn.Parameter]) -> StageReplicas:
        """No stage has replicas here."""
        return NoReplicas()

    def start(self, devices: Sequence[StreamDevice]) -> None:
        """They run until `END` was fed and nothing is under way, or one fails."""
        self._queues.clear()
        self._devices, state = devices, CallerState()
        for lane in self._cuda_lanes():
            lane.stream.wait_stream(torch.cuda.current_stream(lane.device))

        def task(device: StreamDevice, lane: Lane) -> Any:
            def run() -> None:
                try:
                    with lane.entered(), state.entered():
                        device.run()
                finally:
                    if device.failure is not None:
                        self.said.put((-1, None))

            return run

        tasks = [task(device, lane) for device, lane in zip(devices, self._lanes, strict=True)]
        self._team.flows = True
        self._team.begin(tasks, lambda: self.feed(END))

    def meet(self, facts: Mapping[str, Any], error: Exception | None) -> None:
        """There is nobody else."""
        if error is not None:
            raise error

    def hear(self) -> tuple[int, Tensor | None]:
        """What is said next."""
        return self.said.get()

    def compare(self, minibatch: int, batch: Any) -> None:
        """There is one caller."""

    def finish(self, fed: int, why: str) -> Sequence[Stopped]:
        """Waits for the end of all devices; what the caller queues next comes after what they have queued."""
        self._team.finish()
        self._team.flows = False
        for lane in self._cuda_lanes():
            torch.cuda.current_stream(lane.device).wait_stream(lane.stream)
        return self.broken_off()

    def gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        """All of it is here."""
        return state

    def broken_off(self) -> Sequence[Stopped]:
        """How far each stage has come."""
        return [Stopped(each.rule.stage, 0, each.updated, is_torn=each.is_torn) for each in self._devices]

    def _cuda_lanes(self) -> list[CudaLane]:
        return [lane for lane in self._lanes if isinstance(lane, CudaLane)]
