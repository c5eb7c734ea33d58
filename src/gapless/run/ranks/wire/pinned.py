"""Channels for tensors of a GPU that go over Gloo, by way of pinned host memory: several processes may share a GPU."""

from typing import Any

import torch

from gapless.run.lanes import Parcel
from gapless.run.ranks.wire.channel import Courier, Incoming, Outgoing, Waiting
from gapless.run.ranks.wire.gloo import GlooIncoming, GlooOutgoing, OverGloo
from gapless.run.ranks.wire.message import Reader, Writer
from gapless.stage import microbatch as mb


class PinnedOutgoing(GlooOutgoing):
    """Copies to the host on a stream of its own, and posts when the copy is there."""

    def __init__(self, courier: Courier, target: int, kind: str, gpu: torch.device, stream: torch.cuda.Stream) -> None:
        super().__init__(courier, target, kind, Writer(pinned=True))
        self._gpu, self._stream = gpu, stream

    def packed(self, tree: Any) -> Parcel:
        return Parcel(tree, torch.cuda.current_stream(self._gpu).record_event())

    def send(self, item: Parcel, stamp: bytes | None = None) -> None:
        with torch.cuda.stream(self._stream):
            if item.event is not None:
                self._stream.wait_event(item.event)
            message = self._writer.write(item.tree)
            message.mark(stamp or self.courier.stamp.now)
            for tensor in mb.flatten(item.tree)[0]:
                if tensor.is_cuda:
                    tensor.record_stream(self._stream)
            done = torch.cuda.Event(blocking=True)
            done.record(self._stream)
        done.synchronize()  # the network knows nothing of streams
        self.post(message)


class OverGlooPinned(OverGloo):
    """Reaches everybody."""

    name = "Gloo and pinned memory of the host"

    def __init__(self, courier: Courier, waiting: Waiting, gpu: torch.device) -> None:
        super().__init__(courier, waiting)
        self._gpu, self._stream = gpu, torch.cuda.Stream(gpu)

    def outgoing(self, target: int, kind: str) -> Outgoing:
        return PinnedOutgoing(self._courier, target, kind, self._gpu, self._stream)

    def incoming(self, source: int, kind: str) -> Incoming:
        return GlooIncoming(self._courier, self._waiting, source, kind, Reader(pinned=True))
