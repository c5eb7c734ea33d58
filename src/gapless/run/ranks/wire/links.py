"""Channels between processes: through pipes and shared memory on one host, over Gloo between hosts, by NCCL from GPU
to GPU.

Posting a Gloo message costs host time, so one thread of a process, its courier, does all of it; computing goes on
meanwhile. To take a message a device waits for the posted receive itself, so that it is woken once:

    device    ... F(0) -put-> queue        ...            F(1): wait for the posted receive, read
    courier             \\-> write, send   retire sends   post receives ahead

Receives are posted ahead in blocks. The ends agree on the capacity of each block without a word (`Windows`), a message
that does not fit says so and follows as a second one.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gapless.errors import GaplessError, TransportError
from gapless.run.channels import InOrderOfUse, StoppedError
from gapless.run.lanes import Parcel
from gapless.run.ranks.wire.channel import Incoming, Outgoing
from gapless.run.ranks.wire.courier import Courier
from gapless.run.ranks.wire.gloo import GlooIncoming, GlooOutgoing
from gapless.run.ranks.wire.host_memory import HostMemory, Memory
from gapless.run.ranks.wire.nccl import DIRECT, Communicators, NcclIncoming, NcclOutgoing
from gapless.run.ranks.wire.pipes import Inbox, Outbox, PipeIncoming, PipeOutgoing
from gapless.schedule.action import Schedule
from gapless.schedule.routes import Channel, messages

_A_MOMENT = 0.005  # seconds
Explain = Callable[[int, BaseException], Exception]  # the rank that was waited for, and what came instead


class Links:
    """All channels of this process; they outlive the programs that use them."""

    def __init__(
        self,
        courier: Courier,
        device: int,
        ranks: Sequence[int],
        explain: Explain,
        memory: Memory | None = None,
        direct: Communicators | None = None,
        inbox: Inbox | None = None,
        near: Mapping[int, Outbox] | None = None,
    ) -> None:
        """`direct` has the groups by which tensors go from GPU to GPU, if they do; `near` are the inboxes of devices of
        the same host, which write into this one's.
        """
        self.courier, self.device, self.ranks = courier, device, ranks
        self.memory, self.direct = memory or HostMemory(), direct
        self.inbox, self.near = inbox, dict(near or {})
        self.rank = ranks[device]
        self._explain = explain
        self.waits_in: Incoming | None = None  # for any thread to read
        self.since: float | None = None
        self.waited = 0.0  # seconds, in all
        self.stopped = False
        self._outgoing: dict[tuple[int, str], Outgoing] = {}
        self._incoming: dict[tuple[int, str], Incoming] = {}

    def connect(self, channels: Iterable[Channel]) -> None:
        """Every rank is about to use the same channels. What meets its other end before it is used does so here."""
        if self.direct is not None:
            self.direct.connect(channels)

    def outgoing(self, target: int, kind: str) -> Outgoing:
        if (target, kind) not in self._outgoing:
            make = PipeOutgoing if target in self.near else NcclOutgoing if self._is_direct(kind) else GlooOutgoing
            self._outgoing[target, kind] = make(self, target, kind)
        return self._outgoing[target, kind]

    def incoming(self, source: int, kind: str) -> Incoming:
        if (source, kind) not in self._incoming:
            make = PipeIncoming if source in self.near else NcclIncoming if self._is_direct(kind) else GlooIncoming
            self._incoming[source, kind] = make(self, source, kind)
        return self._incoming[source, kind]

    def _is_direct(self, kind: str) -> bool:
        return self.direct is not None and kind in DIRECT

    def stop(self) -> None:
        """Whoever waits here or for this process raises."""
        if not self.stopped:
            self.stopped = True
            self.break_off()

    def break_off(self) -> None:
        """Whoever waits raises, here and at the other ranks."""
        if self.courier.group is not None:
            self.courier.group.break_off()
        if self.direct is not None:
            self.direct.break_off()
        if self.inbox is not None:
            self.inbox.break_off()
        for outbox in self.near.values():
            outbox.break_off()

    def in_child(self) -> None:
        """A forked child has copies of what only this process reads."""
        if self.inbox is not None:
            self.inbox.in_child()

    def check(self) -> None:
        """Raises if this process can't take part in another step."""
        failure = self.courier.failure
        if isinstance(failure, GaplessError):
            raise failure
        if self.stopped or failure is not None:
            raise TransportError(
                "a step failed or was interrupted, and the connections between the ranks went with it: end all ranks, "
                "or close the pipeline and make a new one on every rank"
            ) from failure

    def lost(self, error: BaseException) -> Exception:
        """What is raised where a message will not come."""
        if self.stopped:
            return StoppedError()
        if isinstance(self.courier.failure, GaplessError):
            return self.courier.failure
        assert self.waits_in is not None
        return self._explain(self.ranks[self.waits_in.source], error)

    def close(self, broken: Callable[[], bool] = lambda: False, patience: float = 60.0) -> None:
        """Everything handed over goes out first, but for so many seconds others are waited for at the most. Programs
        may outlive the connections, so these let go of them.
        """
        deadline = time.monotonic() + patience
        for outgoing in self._outgoing.values():
            self.courier.put((Outgoing.settle, outgoing))
        self.courier.close(broken)
        for outgoing in self._outgoing.values():
            while not outgoing.is_over() and not broken() and time.monotonic() < deadline:
                time.sleep(_A_MOMENT)
            outgoing.close()
        for incoming in self._incoming.values():
            incoming.close()
        if self.direct is not None:
            self.direct.close()
        for outbox in self.near.values():
            outbox.close(self.device)
        if self.inbox is not None:
            self.inbox.close()
        self.courier.group = None


class RankChannels:
    """What one device sends and receives in one schedule."""

    def __init__(self, schedule: Schedule, links: Links) -> None:
        self._links = links
        self._takers: dict[Channel, InOrderOfUse] = {}
        produced, consumed = messages(schedule)
        links.connect(produced)
        for channel, uses in consumed.items():
            source, target, kind = channel
            if target == links.device:
                get, order = links.incoming(source, kind).get, [produced[channel][each] for each, _ in uses]
                self._takers[channel] = InOrderOfUse(get, order)

    def sender(self, channel: Channel, *, idle: bool = False) -> Callable[[Any], None]:
        outgoing = self._links.outgoing(channel[1], channel[2])
        return outgoing.put_now if idle and isinstance(self._links.memory, HostMemory) else outgoing.put

    def receiver(self, channel: Channel) -> Callable[[], Any]:
        take = self._takers[channel].take
        return take if isinstance(self._links.memory, HostMemory) else lambda: Parcel(take())

    def stop(self) -> None:
        self._links.stop()

    def clear(self) -> None:
        for taker in self._takers.values():
            taker.clear()
