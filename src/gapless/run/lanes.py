"""A lane is what a device computes on: a CPU thread, or a CUDA stream of its own.

On CUDA nothing waits on the host. What one lane makes and another takes is ordered by events:

    producer's stream   ... F(0) * event
    consumer's stream            \\-> wait, (copy,) F(1) ...

Several lanes may share one GPU, each with its own stream. The host waits in two cases: a CPU reads what a GPU made, and
the caller's batch leaves memory of the host, which the caller may overwrite as soon as the step has returned.
"""

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gapless.stage.batch import microbatch as mb
from gapless.stage.batch.view_bases import marked_as
from gapless.stage.offload.host_link import CpuLink, CudaLink


@dataclass(slots=True)
class Parcel:
    """A tree of tensors on its way from one lane to another, and the event after which it is there."""

    tree: Any
    event: torch.cuda.Event | None = None
    borrowed: bool = False  # the caller's: on a GPU it is there when what the caller has queued is done


class CpuLane:
    """A CPU thread: what is made is there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.caller: dict[torch.device, torch.cuda.Event] = {}  # what the caller has queued on each GPU
        self.link = CpuLink()
        self.origin = 0.0
        self.began = 0.0  # the host's time of the origin

    def pack(self, tree: Any) -> Parcel:
        """Hand a result of this lane to another one."""
        return Parcel(tree)

    def unpack(self, parcel: Parcel) -> Any:
        """What another lane, or the caller, made, as tensors of this one."""
        tensors, shape = mb.flatten(parcel.tree, views=True)
        gpus = {tensor.device for tensor in tensors if tensor.is_cuda}
        if not gpus:
            return parcel.tree
        if parcel.event is not None:
            parcel.event.synchronize()  # a CPU cannot wait in a stream
        for gpu in gpus if parcel.borrowed else ():
            if gpu in self.caller:
                self.caller[gpu].synchronize()
            else:
                torch.cuda.synchronize(gpu)
        return mb.unflatten([_moved(tensor, self.device) for tensor in tensors], shape)

    def follow(self, queued: dict[torch.device, torch.cuda.Event]) -> None:
        """It goes on after what the caller has queued."""
        self.caller = queued

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
    """A stream of its own, and others for the copies that come in, so that they overlap with its work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.copies = torch.cuda.Stream(device)
        self.link = CudaLink(device, self.stream)
        self._batches = torch.cuda.Stream(device)  # copies that the host waits for: nothing else is on their way
        self._sources: dict[torch.device, torch.cuda.Stream] = {}  # of other GPUs, for copies from there
        self.origin = torch.cuda.Event(enable_timing=True)
        self.began = 0.0
        self._thread = 0  # the last that was here
        # Autograd has a thread for each GPU, in which nothing has run yet: cuBLAS would complain to the user.
        torch.zeros((), device=device, requires_grad=True).mul(1.0).backward()

    def pack(self, tree: Any) -> Parcel:
        event = torch.cuda.Event()
        event.record(self.stream)
        return Parcel(tree, event)

    def unpack(self, parcel: Parcel) -> Any:
        tensors, shape = mb.flatten(parcel.tree, views=True)
        if all(tensor.device == self.device for tensor in tensors):
            if parcel.event is not None:
                self.stream.wait_event(parcel.event)
            for tensor in tensors:
                tensor.record_stream(self.stream)
            return parcel.tree
        if parcel.borrowed and any(tensor.is_cpu for tensor in tensors):
            tensors = [self._read(tensor) if tensor.is_cpu else tensor for tensor in tensors]
        return mb.unflatten(self._copied(tensors, parcel.event), shape)

    def _read(self, tensor: Tensor) -> Tensor:
        """A batch of the host's; once this returns, the caller may change it."""
        with torch.cuda.stream(self._batches):
            made = _moved(tensor, self.device)
        made.record_stream(self.stream)
        return made

    def _source(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._sources:
            self._sources[device] = torch.cuda.Stream(device)
        return self._sources[device]

    def _copied(self, tensors: list[Tensor], event: torch.cuda.Event | None) -> list[Tensor]:
        made = []
        with contextlib.ExitStack() as stack:
            # A copy between GPUs runs on the current stream of its source and is ordered with that of its target.
            sources = {tensor.device for tensor in tensors if tensor.device.type == "cuda"} - {self.device}
            streams = {device: self._source(device) for device in sources} | {self.device: self.copies}
            for stream in streams.values():
                stack.enter_context(torch.cuda.stream(stream))
                if event is not None:
                    stream.wait_event(event)
            for tensor in tensors:
                made.append(_moved(tensor, self.device, non_blocking=True))
                if tensor.device.type == "cuda":
                    tensor.record_stream(streams[tensor.device])
                made[-1].record_stream(self.stream)
        self.stream.wait_stream(self.copies)
        return made

    def follow(self, queued: dict[torch.device, torch.cuda.Event]) -> None:
        self.stream.wait_event(queued[self.device])
        self.copies.wait_event(queued[self.device])

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            if threading.get_ident() != self._thread:  # nothing has run in it yet, of which cuBLAS would complain too
                self._thread = threading.get_ident()
                torch.zeros((), device=self.device)
            self.link.settle()
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
    """One for that kind of device; several may share a GPU."""
    return CudaLane(device) if device.type == "cuda" else CpuLane(device)


def _moved(tensor: Tensor, device: torch.device, *, non_blocking: bool = False) -> Tensor:
    """The tensor on that device. One for the CPU is there when this returns: there is no stream to wait in."""
    if tensor.device == device:
        return tensor
    return marked_as(tensor.detach().to(device, non_blocking=non_blocking), tensor)


def computed(tensors: Iterable[Tensor]) -> dict[torch.device, torch.cuda.Event]:
    """When they are there: what the current streams have been given so far."""
    gpus = {each.device for each in tensors if each.is_cuda}
    return {gpu: torch.cuda.current_stream(gpu).record_event() for gpu in gpus}


def await_computed(tensors: Iterable[Tensor], when: Mapping[torch.device, torch.cuda.Event]) -> None:
    """The current streams may read what other ones have computed."""
    for gpu, event in when.items():
        torch.cuda.current_stream(gpu).wait_event(event)
    for each in tensors:
        if each.is_cuda:
            each.record_stream(torch.cuda.current_stream(each.device))


@contextlib.contextmanager
def fenced(lanes: Sequence[Lane]) -> Iterator[None]:
    """The lanes start after what the caller has queued, and what the caller queues next starts after the lanes."""
    queued = queued_by_caller(lanes)
    for lane in lanes:
        lane.follow(queued)
    try:
        yield
    finally:
        for lane in lanes:
            if isinstance(lane, CudaLane):
                torch.cuda.current_stream(lane.device).wait_stream(lane.stream)


def queued_by_caller(lanes: Sequence[Lane]) -> dict[torch.device, torch.cuda.Event]:
    """What the caller has queued so far on each GPU that these may read from."""
    gpus = {lane.device for lane in lanes if isinstance(lane, CudaLane)}
    if torch.cuda.is_initialized():
        gpus.add(torch.device("cuda", torch.cuda.current_device()))
    return {gpu: torch.cuda.current_stream(gpu).record_event() for gpu in gpus}
