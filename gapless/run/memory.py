"""Where tensors are while they cross between processes.

    host       tensors of a CPU are copied into the message
    pinned     tensors of a GPU go through pinned host memory, on a stream of its own: several processes may share a GPU
    device     tensors of a GPU go from GPU to GPU by NCCL; the message, over Gloo, tells what comes

Only the last needs a GPU per process, and a group of two ranks for each channel: NCCL runs what is posted in a group
one after another, so channels that shared one would wait for each other.
"""

from typing import Any, Protocol

import torch

from gapless.run.streams import Parcel
from gapless.run.wire import Message, Writer
from gapless.stage import microbatch as mb


class Memory(Protocol):
    pinned: bool  # whether host buffers are
    device: torch.device | None  # where tensors are sent from directly

    def packed(self, tree: Any) -> Any:
        """A result of the calling thread, as `write` takes it in another."""

    def write(self, writer: Writer, item: Any) -> Message:
        """The message for what was packed, ready to be sent."""


class HostMemory:
    """Of a CPU."""

    pinned, device = False, None

    def packed(self, tree: Any) -> Any:
        return tree

    def write(self, writer: Writer, item: Any) -> Message:
        return writer.write(item)


class GpuMemory:
    """Of a GPU: pinned, or with `direct` from GPU to GPU."""

    def __init__(self, gpu: torch.device, *, direct: bool) -> None:
        self.pinned = not direct
        self.device = gpu if direct else None
        self.stream = torch.cuda.Stream(gpu)
        self._gpu = gpu

    def packed(self, tree: Any) -> Parcel:
        return Parcel(tree, torch.cuda.current_stream(self._gpu).record_event())

    def write(self, writer: Writer, item: Parcel) -> Message:
        with torch.cuda.stream(self.stream):
            if item.event is not None:
                self.stream.wait_event(item.event)
            message = writer.write(item.tree)
            for tensor in mb.flatten(item.tree)[0]:
                if tensor.is_cuda:
                    tensor.record_stream(self.stream)
            if self.pinned:
                done = torch.cuda.Event(blocking=True)
                done.record(self.stream)
        if self.pinned:
            done.synchronize()  # the network knows nothing of streams
        return message
