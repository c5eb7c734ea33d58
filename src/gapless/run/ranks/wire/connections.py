"""All connections of this process to the other ranks of its pipeline.

A channel takes the first carrier that reaches its other end:

    tensors of a CPU    pipes and shared memory on one host, Gloo between hosts
    tensors of a GPU    memory of the GPU on one host, NCCL if the mesh has it, else Gloo by way of pinned memory
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from gapless.errors import ConfigError, GaplessError, TransportError
from gapless.run.channels import StoppedError, takers
from gapless.run.lanes import Parcel
from gapless.run.program import Program
from gapless.run.ranks.wire.channel import Carrier, Courier, Incoming, Outgoing, Waiting
from gapless.run.ranks.wire.gloo import OverGloo, OverGlooPinned
from gapless.run.ranks.wire.gpu_memory.gpu_channels import OverGpuMemory
from gapless.run.ranks.wire.host_reads import host_reads
from gapless.run.ranks.wire.nccl import Communicators
from gapless.run.ranks.wire.pipes import ThroughPipes
from gapless.run.ranks.wire.static_shapes import REHEARSE, SPEAK, Ask, StaticShapes
from gapless.run.world import Carriage
from gapless.schedule.action import Kind, Schedule
from gapless.schedule.routes import Channel, messages
from gapless.stage.graphs.graphed import GraphedStage

_A_MOMENT = 0.005  # seconds
Explain = Callable[[int | None, BaseException], Exception]  # the rank that was waited for, and what came instead


class Connections:
    """The channels of this process, and what carries their messages; they outlive the programs that use them."""

    def __init__(self, courier: Courier, device: int, ranks: Sequence[int], explain: Explain) -> None:
        self.courier, self.device, self.ranks = courier, device, ranks
        self.rank = ranks[device]
        self._explain = explain
        self.waiting = Waiting(self._lost, courier.stamp, self._of_another_call)
        self.carriers: list[Carrier] = []
        self.in_parcels = False  # what goes in and out, but for carriers that keep to a stream
        self.static: StaticShapes | None = None  # if steps may have the shapes of a first one
        self.stopped = False
        self._outgoing: dict[tuple[int, str], Outgoing] = {}
        self._incoming: dict[tuple[int, str], Incoming] = {}

    def connect(self, channels: Iterable[Channel]) -> None:
        """Every rank is about to use the same channels."""
        left = list(channels)
        for carrier in self.carriers:
            carrier.connect([each for each in left if carrier.carries(each)])
            left = [each for each in left if not carrier.carries(each)]

    def outgoing(self, target: int, kind: str) -> Outgoing:
        """The near end of a channel."""
        if (target, kind) not in self._outgoing:
            self._outgoing[target, kind] = self._carrier(target, kind).outgoing(target, kind)
        return self._outgoing[target, kind]

    def incoming(self, source: int, kind: str) -> Incoming:
        """The near end of a channel."""
        if (source, kind) not in self._incoming:
            self._incoming[source, kind] = self._carrier(source, kind).incoming(source, kind)
        return self._incoming[source, kind]

    def in_stream(self, device: int, kind: str) -> bool:
        """Tensors of a GPU come and go in the order of the current stream, and need no parcel."""
        return self._carrier(device, kind).in_stream

    def _carrier(self, device: int, kind: str) -> Carrier:
        return next(carrier for carrier in self.carriers if carrier.reaches(device, kind))

    def described(self) -> Iterator[str]:
        """What carries tensors to and from which rank, a line for each carrier."""
        found: dict[str, list[int]] = {}
        for device, rank in enumerate(self.ranks):
            if device != self.device:
                found.setdefault(self._carrier(device, "activation").name, []).append(rank)
        for name, ranks in found.items():
            words = (
                f"  rank {self.rank} reaches rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} through {name}"
            )
            yield f"{words}, with static shapes" if self.static is not None and self.static.is_used else words

    def stop(self) -> None:
        """Whoever waits here or for this process raises."""
        if not self.stopped:
            self.stopped = True
            self.break_off()

    def break_off(self) -> None:
        """Whoever waits raises, here and at the other ranks."""
        for carrier in reversed(self.carriers):
            carrier.break_off()

    def in_child(self) -> None:
        """A forked child has copies of what only this process reads."""
        for carrier in self.carriers:
            carrier.in_child()

    def check(self) -> None:
        """Raises if this process can't take part in another step."""
        failure = self.courier.failure
        if isinstance(failure, GaplessError):
            raise failure
        if self.stopped or failure is not None:
            raise TransportError(
                "a step failed or was interrupted, which closed the connections between the ranks: end all ranks, "
                "or close the pipeline and make a new one on every rank"
            ) from failure

    def meet(self) -> None:
        """All ranks of the pipeline do. Who is there first waits, and is not busy."""
        if (group := self.courier.group) is not None:
            self.await_all(group.barrier())

    def await_all(self, work: Any) -> None:
        """What all ranks of the pipeline do together is done."""
        waiting = self.waiting
        waiting.channel, waiting.since = None, (since := time.monotonic())
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(None, error) from None
        waiting.since = None
        waiting.seconds += time.monotonic() - since

    def _lost(self, source: int | None, error: BaseException) -> Exception:
        """What is raised where a message will not come."""
        if self.stopped:
            return StoppedError()
        if isinstance(self.courier.failure, GaplessError):
            return self.courier.failure
        return self._explain(None if source is None else self.ranks[source], error)

    def _of_another_call(self, stamp: bytes, source: int) -> Exception:
        return self.courier.stamp.refuse(stamp, self.rank, self.ranks[source])

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
        for carrier in self.carriers:
            carrier.close()


def connect_all(
    courier: Courier,
    device: int,
    ranks: Sequence[int],
    explain: Explain,
    gpu: torch.device | None,
    *,
    has_nccl: bool,
    carriage: Carriage,
) -> Connections:
    """Every rank of the pipeline calls it. `gpu` is where the tensors of this one are, if not in memory of the host."""
    made = Connections(courier, device, ranks, explain)
    made.in_parcels = gpu is not None
    transport, static = carriage
    if static is True or (static == "auto" and gpu is not None):
        made.static = StaticShapes(promised=static is True)
    if transport == "nccl" and not has_nccl:
        raise ConfigError(
            "transport='nccl' needs GPUs and a mesh whose groups have NCCL: init_process_group('cpu:gloo,cuda:nccl') "
            "before init_device_mesh('cuda', ...)"
        )
    if courier.group is not None and transport in ("auto", "memory"):
        failures: list[str] = []
        if gpu is None:
            made.carriers.extend(ThroughPipes.found(courier, made.waiting, device))
        else:
            made.carriers.extend(OverGpuMemory.found(courier, made.waiting, device, gpu, failures))
        if transport == "memory":
            _check_reached(made, failures)
    if gpu is not None and has_nccl and transport in ("auto", "nccl"):
        made.carriers.append(Communicators(courier, made.waiting, ranks, device, gpu))
    if courier.group is not None:
        gloo = OverGloo(courier, made.waiting) if gpu is None else OverGlooPinned(courier, made.waiting, gpu)
        made.carriers.append(gloo)
    return made


def _check_reached(made: Connections, failures: Sequence[str]) -> None:
    others = [device for device in range(len(made.ranks)) if device != made.device]
    missed = [device for device in others if not any(each.reaches(device, "activation") for each in made.carriers)]
    if missed:
        raise ConfigError(
            f"transport='memory', but rank {made.rank} can't reach rank {made.ranks[missed[0]]} through memory: they "
            "are on different hosts, in containers that may not see each other, or on GPUs with no way to each "
            f"other{''.join(f' ({each})' for each in failures[:1])}; leave transport out, and the best one that works "
            "is chosen"
        )


class _Play:
    """What a rehearsal is for: a new one is rehearsed anew, and what was known of the old one is let go of."""


class RankChannels:
    """What a device sends and receives in one schedule. `follows`: the shapes of it follow from those of the batch."""

    def __init__(self, schedule: Schedule, connections: Connections) -> None:
        self._connections = connections
        channels, _ = messages(schedule)
        connections.connect(channels)
        mine = [channel for channel in channels if channel[1] == connections.device]
        gets = {(source, to, kind): connections.incoming(source, kind).get for source, to, kind in mine}
        self._takers = takers(schedule, gets)
        has_gpus = connections.in_parcels
        static, once = connections.static, schedule.kinds != {Kind.FORWARD} and Kind.VERDICT not in schedule.kinds
        self._is_static = has_gpus and static is not None and once
        self.follows = static is not None and static.promised
        self._looks = 2 if self._is_static and not self.follows else 0
        self._play, self._is_rehearsed, self._plays = _Play(), False, self.follows
        self._ends: list[Incoming | Outgoing] = []  # of messages that need no word
        if self._is_static:
            me = connections.device
            used = [channel for channel in channels if me in channel[:2] and self.in_stream(channel)]
            self._ends += [connections.incoming(source, kind) for source, target, kind in used if target == me]
            self._ends += [connections.outgoing(target, kind) for source, target, kind in used if source == me]

    def begin(self) -> None:
        """A step starts."""
        if self._plays:
            for each in self._ends:
                each.begin(self._play)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Around a step. The first one may ask for numbers to learn about layers, so there is another look."""
        with host_reads() if self._looks and not self.follows else contextlib.nullcontext() as reads:
            yield
        if reads is not None:
            self.follows, self._looks = not reads, self._looks - 1

    def end(self) -> None:
        """A step without words ends well only if every device has sent what it was to send, of the right shapes. All of
        them meet, so that no host is more than a step ahead.
        """
        if self._plays and self._is_static:
            for each in self._ends:
                each.end()
            self._is_rehearsed = True
            self._connections.meet()

    def agree(self, program: Program, inputs: Any, target: Any, ask: Ask) -> None:
        """Before a step: whether messages tell what they are. A rank that has made its program anew knows nothing, and
        what it sends is elsewhere: then all ranks rehearse the step, as the first one. Not before graphs are captured:
        to load a kernel may wait for the GPU, and nobody could release that meanwhile.
        """
        static = self._connections.static
        if static is None or not (self._is_static or static.promised):
            return
        rehearsed = self._is_rehearsed or not self._is_static
        graphed = (stage for stage in program.stages.values() if isinstance(stage, GraphedStage))
        follows = self.follows and all(stage.likenesses.settled for stage in graphed)
        answer = static.agreed(program, inputs, target, ask, rehearsed=rehearsed, follows=follows)
        self._plays = answer != SPEAK
        if answer == REHEARSE:
            self._play, self._is_rehearsed = _Play(), False

    def in_stream(self, channel: Channel) -> bool:
        source, target, kind = channel
        other = source if target == self._connections.device else target
        return self._connections.in_stream(other, kind)

    def sender(self, channel: Channel, *, idle: bool = False) -> Callable[[Any], None]:
        outgoing = self._connections.outgoing(channel[1], channel[2])
        return outgoing.put_now if idle and not self._connections.in_parcels else outgoing.put

    def receiver(self, channel: Channel) -> Callable[[], Any]:
        take, in_parcels = self._takers[channel].take, self._connections.in_parcels
        return (lambda: Parcel(take())) if in_parcels and not self.in_stream(channel) else take

    def drain(self, counts: Mapping[Channel, tuple[int, int]]) -> None:
        for channel, (sent, taken) in counts.items():
            self._takers[channel].drain(sent, taken)

    def stop(self) -> None:
        self._connections.stop()

    def clear(self) -> None:
        for taker in self._takers.values():
            taker.clear()
