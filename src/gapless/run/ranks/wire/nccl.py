"""Channels from GPU to GPU, by NCCL groups of gapless's own. The message over Gloo tells what comes.

    sender      F(0)  message -> Gloo      pack -> NCCL send      posted by the device itself, in its order
    receiver    message <- Gloo            NCCL recv -> F(1)      posted once the message is there, or known before

What is posted in a group runs in order, on the GPU. Each channel has a group of its two ranks, so the one order in it
is the producer's, which the deadlock proof stands on. Three rules keep hosts and GPUs from waiting for each other:

1. The first use of a group is a meeting of its two ranks, in which the thread that posts stands still. So all groups
   are made before the first step, in one order on all ranks, and used once.
2. The stream that computes never waits for a send, only for a receive. Memory that is sent is kept until it is over.
3. A send is posted before anything that its device does next. Streams may share a queue of the GPU, and a send behind
   a receive that waits for it would never start.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gapless.run.ranks.wire.channel import DIRECT, Carrier, Courier, Incoming, Outgoing, Waiting
from gapless.run.ranks.wire.gloo import GlooIncoming, GlooOutgoing
from gapless.run.ranks.wire.groups import NEVER, keep_for_ever, part_of_store
from gapless.run.ranks.wire.layout import TreeLayout
from gapless.run.ranks.wire.message import NO_ID, Message, Reader, Writer
from gapless.run.ranks.wire.static_shapes import Rehearsal, another_shape
from gapless.schedule.routes import Channel

_MOST_BLOCKS = 4  # of threads that one transfer takes from computing
_PATIENCE = 5.0  # seconds


def is_used(mesh: DeviceMesh) -> bool:
    """Whether the user's own groups take NCCL for tensors of a GPU. With Gloo, several ranks may share one."""
    if mesh.device_type != "cuda":
        return False
    name: str = mesh.get_group("pp")._get_backend(torch.device("cuda")).name()
    return name == "nccl"


def connected(name: str, ranks: Sequence[int], number: int, *, most_blocks: int | None = None) -> Any:
    """A group of these ranks, in which this one has that number. Its streams have priority: they are short, and do not
    share a queue of the GPU with those that compute.
    """
    nccl: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined, unused-ignore]
    options = nccl.Options(is_high_priority_stream=True)
    options._timeout = timedelta(seconds=NEVER)
    if most_blocks is not None:
        options.config.max_ctas = most_blocks
    return nccl(part_of_store(f"nccl {name}", ranks), number, len(ranks), options)


class Communicators(Carrier):
    """The groups of a pipeline's channels, and that of its replicas."""

    name = "NCCL"
    in_stream = True

    def __init__(
        self, courier: Courier, waiting: Waiting, ranks: Sequence[int], device: int, gpu: torch.device
    ) -> None:
        self._courier, self._waiting, self._gpu = courier, waiting, gpu
        self._stream = torch.cuda.Stream(gpu)  # on which nothing waits: receives start at once
        self._ranks, self._device = ranks, device
        self._known: set[Channel] = set()  # of all ranks
        self._groups: dict[Channel | str, Any] = {}  # of this one
        self._broken = False

    def connect_replicas(self, gloo: Any, ranks: Sequence[int], number: int) -> Any:
        """The group that adds gradients, used once; `gloo` is one of the same ranks."""
        gloo.barrier().wait()
        group = self._groups["dp"] = connected("dp", ranks, number)
        group.allreduce([torch.zeros(1, device=self._gpu)]).wait()
        torch.cuda.current_stream(self._gpu).synchronize()
        return group

    def connect(self, channels: Iterable[Channel]) -> None:
        """Every rank names the same channels. Nobody enters a meeting before all are there: until then a rank that
        fails is noticed.
        """
        new = sorted(set(channels) - self._known, key=_order)
        if not new:
            return
        self._courier.group.barrier().wait()
        for channel in new:
            source, target, kind = channel
            if self._device in (source, target):
                pair = sorted((source, target))
                ranks, number = [self._ranks[each] for each in pair], pair.index(self._device)
                group = connected(f"{kind} from {source} to {target}", ranks, number, most_blocks=_MOST_BLOCKS)
                self._groups[channel] = group
                self._meet(group, sends=self._device == source)
        self._known.update(new)

    def _meet(self, group: Any, *, sends: bool) -> None:
        _posted(group, group.send if sends else group.recv, torch.zeros(1, dtype=torch.uint8, device=self._gpu)).wait()
        torch.cuda.current_stream(self._gpu).synchronize()

    def carries(self, channel: Channel) -> bool:
        return channel[2] in DIRECT

    def reaches(self, device: int, kind: str) -> bool:
        return kind in DIRECT

    def outgoing(self, target: int, kind: str) -> Outgoing:
        group = self._groups[self._device, target, kind]
        return NcclOutgoing(self._courier, target, kind, group, self._gpu)

    def incoming(self, source: int, kind: str) -> Incoming:
        group = self._groups[source, self._device, kind]
        reader = DirectReader(group, self._gpu, self._stream)
        return NcclIncoming(self._courier, self._waiting, source, kind, reader)

    def break_off(self) -> None:
        """What waits on the GPU for another rank ends."""
        if not self._broken:
            self._broken = True
            abort_all(list(self._groups.values()))

    def close(self) -> None:
        for group in self._groups.values():
            if not self._broken:
                group.shutdown()
            else:  # never let go of: that waits for its threads, and these for all that was ever posted
                keep_for_ever(group)
        self._groups.clear()


def abort_all(groups: Sequence[Any], patience: float = _PATIENCE) -> None:
    """All at the same time. To abort one waits until the GPU is idle, and that is not before kernels of the others,
    which wait for the same rank, are aborted too: one after another they could wait for ever. What still waits after
    some seconds is left to the end of the process.
    """
    threads = [threading.Thread(target=group.abort, name="gapless aborts NCCL", daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _posted(group: Any, operate: Callable[..., Any], data: Tensor) -> Any:
    """To or from the other rank of the group. As a batch of one: of single operations torch complains."""
    group._start_coalescing()
    operate([data], 1 - group.rank(), 0)
    return group._end_coalescing()


def _order(channel: Channel) -> tuple[int, Channel]:
    """Pairs that have no rank in common meet at the same time."""
    return min(channel[:2]) % 2, channel


class DirectWriter(Writer):
    """Packs tensors into one piece of a GPU's memory, on the stream that has made them: what is sent next is ordered by
    it.
    """

    def __init__(self, gpu: torch.device) -> None:
        super().__init__()
        self._gpu = gpu

    def _message(self, layout: TreeLayout, number: int, description: bytes) -> Message:
        with torch.inference_mode(False):
            apart = torch.empty(layout.size, dtype=torch.uint8, device=self._gpu)
        return Message(layout, number, description, apart=apart)


class NcclOutgoing(GlooOutgoing):
    """Posts sends at once, in the thread of the device."""

    def __init__(self, courier: Courier, target: int, kind: str, group: Any, gpu: torch.device) -> None:
        super().__init__(courier, target, kind, DirectWriter(gpu))
        self._group = group
        self._under_way: deque[tuple[Any, Tensor]] = deque()
        self._rehearsal: Rehearsal[int] = Rehearsal()

    def begin(self, program: object) -> None:
        self._rehearsal.begin(program)

    def end(self) -> None:
        self._rehearsal.end()

    def put(self, item: Any) -> None:
        self.send(item)

    def send(self, item: Any, stamp: bytes | None = None) -> None:
        message, expected = self._writer.write(item), self._rehearsal.next()
        assert message.apart is not None
        if expected is None:
            message.mark(stamp or self.courier.stamp.now)
            self.post(message)
            self._rehearsal.note(message.number if message.number != NO_ID and message.apart.numel() else None)
        elif message.number != expected:
            raise another_shape(item)
        while self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()
        if message.apart.numel():
            self._under_way.append((_posted(self._group, self._group.send, message.apart), message.apart))

    def is_over(self) -> bool:
        return all(work.is_completed() for work, _ in self._under_way)

    def close(self) -> None:
        super().close()
        self._group = None
        self._under_way.clear()


class DirectReader(Reader):
    """Receives are posted when the message says what comes."""

    def __init__(self, group: Any, gpu: torch.device, stream: torch.cuda.Stream) -> None:
        super().__init__()
        self._group, self._gpu, self._stream = group, gpu, stream
        self.rehearsal: Rehearsal[TreeLayout] = Rehearsal()

    def layout(self, number: int, description: bytes) -> TreeLayout:
        found = super().layout(number, description)
        self.rehearsal.note(found if number != NO_ID and found.size else None)
        return found

    def read_ahead(self) -> Any:
        """The tree of the next message without a word of it; None if there has to be a word."""
        layout = self.rehearsal.next()
        if layout is None:
            return None
        storage = self._received(layout.size).untyped_storage()
        return layout.tree([place.read(storage, 0) for place in layout.places])

    def _data(self, buffer: Tensor, start: int, elsewhere: int, size: int) -> tuple[Tensor, int]:
        return self._received(size), 0

    def _received(self, size: int) -> Tensor:
        with torch.cuda.stream(self._stream):
            data = torch.empty(size, dtype=torch.uint8, device=self._gpu)
            work = _posted(self._group, self._group.recv, data) if size else None
        data.record_stream(torch.cuda.current_stream(self._gpu))
        if work is not None:
            work.wait()  # the stream does, not the host
        return data


class NcclIncoming(GlooIncoming):
    """Waits for a word of what comes, if it has to be told."""

    def __init__(self, courier: Courier, waiting: Waiting, source: int, kind: str, reader: DirectReader) -> None:
        super().__init__(courier, waiting, source, kind, reader)
        self._direct = reader

    def begin(self, program: object) -> None:
        self._direct.rehearsal.begin(program)

    def end(self) -> None:
        self._direct.rehearsal.end()

    def next(self) -> Any:
        tree = self._direct.read_ahead()
        return super().next() if tree is None else tree
