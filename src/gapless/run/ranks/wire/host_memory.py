"""Where tensors are while they cross between processes.

host       tensors of a CPU are copied into the message
pinned     tensors of a GPU go through pinned host memory, on a stream of its own: several processes may share a GPU
direct     tensors of a GPU are packed into one piece of its memory, from which NCCL takes them; the message, over
           Gloo, tells what comes
"""

from typing import Any, Protocol

import torch

from gapless.run.lanes import Parcel
from gapless.run.ranks.wire.message import Message, Writer
from gapless.stage import microbatch as mb


class Memory(Protocol):
    @property
    def pinned(self) -> bool:
        """Whether host buffers are."""

    @property
    def device(self) -> torch.device | None:
        """Where tensors are sent from directly."""

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


class PinnedMemory:
    """Of a GPU, by way of the host."""

    pinned, device = True, None

    def __init__(self, gpu: torch.device) -> None:
        self._gpu, self._stream = gpu, torch.cuda.Stream(gpu)

    def packed(self, tree: Any) -> Parcel:
        return Parcel(tree, torch.cuda.current_stream(self._gpu).record_event())

    def write(self, writer: Writer, item: Parcel) -> Message:
        with torch.cuda.stream(self._stream):
            if item.event is not None:
                self._stream.wait_event(item.event)
            message = writer.write(item.tree)
            for tensor in mb.flatten(item.tree)[0]:
                if tensor.is_cuda:
                    tensor.record_stream(self._stream)
            done = torch.cuda.Event(blocking=True)
            done.record(self._stream)
        done.synchronize()  # the network knows nothing of streams
        return message


class DirectMemory:
    """Of a GPU. Tensors are packed on the stream that has made them: what is sent next is ordered by it."""

    pinned = False

    def __init__(self, gpu: torch.device) -> None:
        self.device = gpu

    def packed(self, tree: Any) -> Parcel:
        return Parcel(tree)

    def write(self, writer: Writer, item: Parcel) -> Message:
        return writer.write(item.tree)
