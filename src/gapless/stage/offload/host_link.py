"""The link of a device to its host: copies there and back, beside what the device computes.

On a GPU each way has a stream, and the host's memory is pinned. It is taken once for each size, and again when what was
in it has come back:

    compute   F(0) * F(1) ...        ... * B(0)
    out              \\-> O(0) *          /
    back                       \\-> L(0)
"""

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gapless.errors import GaplessError


class CpuLink:
    """Copies into buffers of their own: where the device is the host, nothing is gained but the same actions."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)  # by size
        self.last: tuple[Any, Any] = 0.0, 0.0  # when the last copies started and ended, as marks of the device's lane

    def out(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copies of these, each a row of bytes, in the host's memory."""
        start = time.perf_counter()
        copies = [self._buffer(tensor.numel()).copy_(tensor) for tensor in tensors]
        self.last = start, time.perf_counter()
        return copies

    def gone(self) -> torch.cuda.Event | None:
        """The event after which the memory of all that has gone out is free, unless somebody else holds it."""
        return None

    def back(self, copies: list[Tensor]) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """On the device again, and the event after which they are there."""
        start = time.perf_counter()
        made = [copy.clone() for copy in copies]
        self.last = start, time.perf_counter()
        self._give_back(copies)
        return made, None

    def _buffer(self, size: int) -> Tensor:
        free = self._free[size]
        return free.pop() if free else self._made(size)

    def _give_back(self, copies: list[Tensor]) -> None:
        for copy in copies:
            self._free[copy.numel()].append(copy)

    def _made(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)


class CudaLink(CpuLink):
    """Of a GPU, whose work is in `stream`."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        super().__init__()
        self._stream = stream
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._used: dict[int, torch.cuda.Event] = {}  # buffers, by address: the end of the last copy to or from each

    def out(self, tensors: list[Tensor]) -> list[Tensor]:
        copies = [self._buffer(tensor.numel()) for tensor in tensors]
        self._out.wait_stream(self._stream)
        with self._among(self._out, copies):
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._out)  # its memory is free again when the copy has ended
        return copies

    def gone(self) -> torch.cuda.Event | None:
        event: torch.cuda.Event = self._out.record_event()
        return event

    def back(self, copies: list[Tensor]) -> tuple[list[Tensor], torch.cuda.Event | None]:
        # Torch gives each stream memory that the others can't have, so this is of the stream that all else is of.
        with torch.cuda.stream(self._stream):
            made = [torch.empty_like(copy, device=self._stream.device) for copy in copies]
        self._back.wait_stream(self._stream)
        with self._among(self._back, copies):
            for tensor, copy in zip(made, copies, strict=True):
                tensor.copy_(copy, non_blocking=True)
        self._give_back(copies)
        return made, self.last[1]

    def settle(self) -> None:
        """Copies of a step that was given up end before what comes next uses their memory."""
        if self._used:
            self._stream.wait_stream(self._back)

    @contextlib.contextmanager
    def _among(self, stream: torch.cuda.Stream, copies: list[Tensor]) -> Iterator[None]:
        """In this stream, after what these buffers were used for before."""
        for event in {self._used[copy.data_ptr()] for copy in copies if copy.data_ptr() in self._used}:
            stream.wait_event(event)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        with torch.cuda.stream(stream):
            yield
        end.record(stream)
        self.last = start, end
        self._used.update((copy.data_ptr(), end) for copy in copies)

    def _made(self, size: int) -> Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise GaplessError(
                f"the host has no {size:,} bytes of pinned memory left for activations: {str(error).splitlines()[0]}; "
                "offload fewer stages, or use remat"
            ) from error


Link = CpuLink | CudaLink


_LARGE, _SMALL = 64 * 2**20, 4096  # bytes of a copy that is timed
_ROUNDS = 5


def link_speed(device: torch.device) -> tuple[float, float]:
    """Of copies to the host, while others come back: seconds whatever their size, and bytes per second."""
    on_gpu = device.type == "cuda"
    link = CudaLink(device, torch.cuda.current_stream(device)) if on_gpu else CpuLink()

    def seconds(size: int) -> float:
        there = torch.zeros(size, dtype=torch.uint8, device=device)
        away, taken = link.out([there]), []
        for _ in range(1 + _ROUNDS):
            if on_gpu:
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            next_away = link.out([there])
            link.back(away)
            if on_gpu:
                torch.cuda.synchronize(device)
            taken.append((time.perf_counter() - start) / (1 if on_gpu else 2))  # one after the other on a CPU
            away = next_away
        return statistics.median(taken[1:])

    latency = seconds(_SMALL)
    return latency, _LARGE / max(1e-9, seconds(_LARGE) - latency)
