"""A lane is what a device computes on: a CPU thread, or a CUDA stream of its own.

On CUDA nothing waits on the host. What one lane makes and another takes is ordered by events:

    producer's stream   ... F(0) * event
    consumer's stream            \\-> wait, (copy,) F(1) ...

Several lanes may share one GPU, each with its own stream.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gapless.stage import microbatch as mb


@dataclass(slots=True)
class Parcel:
    """A tree of tensors on its way from one lane to another, and the event after which it is there."""

    tree: Any
    event: torch.cuda.Event | None = None


class CpuLane:
    """A CPU thread: what is made is there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.origin = 0.0
        self.began = 0.0  # the host's time of the origin

    def pack(self, tree: Any) -> Parcel:
        """Hand a result of this lane to another one."""
        return Parcel(tree)

    def unpack(self, parcel: Parcel) -> Any:
        """What another lane, or the caller, made, as tensors of this one."""
        if parcel.event is not None:
            parcel.event.synchronize()  # a CPU cannot wait in a stream
        return moved(parcel.tree, self.device)

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Around everything this lane computes."""
        return contextlib.nullcontext()

    def now(self) -> float:
        """A mark in time, cheap to take; `seconds` makes it a number when the step is over."""
        return time.perf_counter()

    def begin(self) -> None:
        self.origin = self.began = self.now()

    def seconds(self, mark: float) -> float:
        return mark - self.origin


class CudaLane:
    """A stream of its own, and one for the copies that come in, so that they overlap with its work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.copies = torch.cuda.Stream(device)
        self.origin = torch.cuda.Event(enable_timing=True)
        self.began = 0.0

    def pack(self, tree: Any) -> Parcel:
        event = torch.cuda.Event()
        event.record(self.stream)
        return Parcel(tree, event)

    def unpack(self, parcel: Parcel) -> Any:
        tensors, shape = mb.flatten(parcel.tree)
        if all(tensor.device == self.device for tensor in tensors):
            if parcel.event is not None:
                self.stream.wait_event(parcel.event)
            for tensor in tensors:
                tensor.record_stream(self.stream)
            return parcel.tree
        return mb.unflatten(self._copied(tensors, parcel.event), shape)

    def _copied(self, tensors: list[Tensor], event: torch.cuda.Event | None) -> list[Tensor]:
        made = []
        with contextlib.ExitStack() as stack:
            # A copy between GPUs runs on the current stream of its source and is ordered with that of its target.
            sources = {tensor.device for tensor in tensors if tensor.device.type == "cuda"} - {self.device}
            streams = {device: torch.cuda.Stream(device) for device in sources} | {self.device: self.copies}
            for stream in streams.values():
                stack.enter_context(torch.cuda.stream(stream))
                if event is not None:
                    stream.wait_event(event)
            for tensor in tensors:
                made.append(_moved(tensor, self.device))
                if tensor.device.type == "cuda":
                    tensor.record_stream(streams[tensor.device])
                made[-1].record_stream(self.stream)
        self.stream.wait_stream(self.copies)
        return made

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def begin(self) -> None:
        self.stream.synchronize()
        self.origin, self.began = self.now(), time.perf_counter()

    def seconds(self, mark: torch.cuda.Event) -> float:
        """Waits for the mark: only asked for when the step is over."""
        mark.synchronize()
        return float(self.origin.elapsed_time(mark)) / 1000


Lane = CpuLane | CudaLane


def make_lane(device: torch.device) -> Lane:
    return CudaLane(device) if device.type == "cuda" else CpuLane(device)


def moved(tree: Any, device: torch.device) -> Any:
    """The tree on that device; what is there already is not touched."""
    tensors, shape = mb.flatten(tree)
    if all(tensor.device == device for tensor in tensors):
        return tree
    return mb.unflatten([_moved(tensor, device) for tensor in tensors], shape)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    made = tensor.detach().to(device, non_blocking=True)
    return made.requires_grad_() if tensor.requires_grad else made


@contextlib.contextmanager
def fenced(lanes: Sequence[Lane]) -> Iterator[None]:
    """The lanes start after what the caller has queued, and what the caller queues next starts after the lanes."""
    streams = [lane for lane in lanes if isinstance(lane, CudaLane)]
    for lane in streams:
        lane.stream.wait_stream(torch.cuda.current_stream(lane.device))
        lane.copies.wait_stream(torch.cuda.current_stream(lane.device))
    try:
        yield
    finally:
        for lane in streams:
            torch.cuda.current_stream(lane.device).wait_stream(lane.stream)
