"""One device of a flow as a rank among others: under torchrun every process has a stage.

    rank 0   parts -> F  --activation-->  rank 1   F  --activation-->  rank 2   F -> loss to all ranks
                      B  <--gradient----           B  <--gradient----           B

Every rank is fed the same minibatches, and a device begins a minibatch that its own rank was fed: where one of them
ends, all do. The word that nothing more comes travels both ways, exactly once over each channel, and from the last
device to all ranks with the losses; what was under way beyond it is dropped. So the channels are empty when a flow has
ended, in order or not, as long as all ranks live.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from gapless.errors import ConfigError, TransportError, noted_place
from gapless.guards.between_ranks import SAME_CALLS
from gapless.run.ranks.many_processes import ManyProcesses
from gapless.run.ranks.watch.blame import in_short, is_lost
from gapless.run.ranks.wire.call_stamp import differences
from gapless.run.ranks.wire.channel import PASSED
from gapless.run.streams.rank_neighbours import BatchComparison, RankNeighbours
from gapless.run.streams.stage_replicas import NoReplicas, ReplicasByGroup, ReplicasInTurns, StageReplicas
from gapless.run.streams.stream_device import End, Fed, StreamDevice
from gapless.run.streams.stream_runner import Said, Stopped, StreamRunner
from gapless.run.thread_state import CallerState
from gapless.schedule.placement import Placement

_LOG = logging.getLogger("gapless")


class RankRunner(StreamRunner):
    """Runs the device of this rank, and hears the losses from the last one."""

    def __init__(self, world: ManyProcesses, placement: Placement) -> None:
        super().__init__([world.lane], world.team)
        self._world, self._position, self._watch = world, world.position, world.watch
        self._parts: queue.SimpleQueue[Fed | End] = queue.SimpleQueue()
        self._placement, here = placement, self._position.device
        self._cycle = placement.cycles[placement.stages[here][0]]
        self._last = placement.cycles[-1]
        self._losses = {each: world.links.incoming(each, PASSED) for each in self._last if each != here}
        self._own: Said = self.said if self._last == (here,) else queue.SimpleQueue()
        self._batches = BatchComparison(world, placement)
        self._neighbours = RankNeighbours(world, placement, self._parts, self._own, self._batches)
        self._device: StreamDevice | None = None
        self._fed = 0
        self._ranks = self._position.ring  # those of one replica after those of another
        self._rank = self._position.pp_ranks[here]

    def replicas(self, parameters: Sequence[nn.Parameter]) -> StageReplicas:
        """The same stage on other ranks: in other replicas of the pipeline, or in this one."""
        group, cycle = self._world.groups.dp, self._cycle
        if len(cycle) > 1:
            return ReplicasInTurns(self._world.links, cycle, cycle.index(self._position.device), parameters)
        return NoReplicas() if group is None else ReplicasByGroup(group, parameters)

    def neighbours(self, stage: int) -> RankNeighbours:
        """Of that stage, which is the one here."""
        assert stage in self._placement.stages[self._position.device]
        return self._neighbours

    def meet(self, facts: Mapping[str, Any], error: Exception | None) -> None:
        """All ranks are to do the same, and all can, or all refuse."""
        rows = self._world.groups.everywhere([facts, "" if error is None else in_short(error)])
        if error is not None:
            raise error
        for rank, (theirs, fault) in zip(self._ranks, rows, strict=True):
            if fault:
                raise ConfigError(f"rank {rank} can't continue its stream: {fault}")
            for name, one, other in differences(rows[0][0], theirs):
                raise SAME_CALLS.refusal(
                    f"the ranks disagree about their stream: {name} is {one} on rank {self._ranks[0]} and {other} on "
                    f"rank {rank}"
                )

    def start(self, devices: Sequence[StreamDevice]) -> None:
        """The device runs until its rank or another one has ended the flow."""
        (device,) = devices
        for each in (self._parts, self.said, self._own):
            while not each.empty():
                each.get()
        self._device, state, lane = device, CallerState(), self._world.lane
        self._fed = device.at
        self._neighbours.begin(device)
        self._batches.begin(device.at, device.rule.origin[0])
        listening = threading.Thread(target=self._listen, args=(device,), name="gapless losses", daemon=True)

        def run() -> None:
            listening.start()
            try:
                with lane.entered(), state.entered(), self._watch.whereabouts.flowing(device):
                    device.run()
                if device.failure is not None and self._is_lost(device.failure[1]):
                    self._watch.tally.tell(self._rank, device.at)
            finally:
                listening.join()
                self.said.put((-1, None))

        self._watch.roll.begin()
        self._begin([run])
        self._watch.whereabouts.call = ""  # the caller goes its way

    def _listen(self, device: StreamDevice) -> None:
        """To the last stage, until it has no more to say: to each of its replicas in turn."""
        if self._own is self.said:  # which hears itself
            return
        minibatch, count = device.at, len(self._last)
        speaking = set(self._last)
        with contextlib.suppress(RuntimeError):  # the device knows why
            while len(speaking) == count:
                source = self._last[(minibatch - device.rule.origin[0]) % count]
                loss = self._heard(source)
                if loss is None:
                    speaking.discard(source)
                else:
                    self.said.put((minibatch, loss))
                    minibatch += 1
        self.said.put((-1, None))
        with contextlib.suppress(RuntimeError):
            for source in speaking if len(speaking) < count else ():
                while self._heard(source) is not None:
                    pass

    def _heard(self, source: int) -> Tensor | None:
        """A loss, or None: there is no other."""
        if source == self._position.device:
            return self._own.get()[1]
        words = self._losses[source].next()
        return None if isinstance(words, str) else words[0].to(self._position.torch_device)

    def compare(self, minibatch: int, batch: Any) -> None:
        """With that of the rank at the other end of the pipeline, now and then."""
        self._batches.note(minibatch, batch)

    def feed(self, part: Fed | End) -> None:
        assert self._device is not None
        rule = self._device.rule
        if isinstance(part, End) or not rule.in_turns or (self._fed - rule.number(0)) % rule.replicas == 0:
            self._parts.put(part)
        self._fed += 1

    def hear(self) -> tuple[int, Tensor | None]:
        """What is said next. A rank that was asked to leave does so between two minibatches."""
        if self._watch.departure.was_asked():
            _LOG.warning("rank %d ends its stream and exits: it received SIGTERM", self._rank)
            raise SystemExit(0)
        self._watch.whereabouts.call = "in a stream"
        try:
            return super().hear()
        finally:
            self._watch.whereabouts.call = ""

    def finish(self, fed: int, why: str) -> Sequence[Stopped]:
        """Waits for the end of the device, and of those of all ranks."""
        assert self._device is not None
        self._watch.whereabouts.call = "draining its stream"
        self._end()
        if self._device.failure is not None:
            error = self._device.failure[1]
            if self._is_lost(error):
                self._device.failure = None
                raise error
            why = f"failed {noted_place(error)}: {in_short(error)}"
        why = why and f"rank {self._rank} {why}"
        stage, first = self._device.rule.stage, self._position.replica * self._position.num_devices
        own = Stopped(stage, self._rank, self._device.at, fed, why, self._device.is_torn)
        rows = self._world.groups.everywhere([own, self._batches.passed])
        self._batches.finish([passed for _, passed in rows[first : first + self._position.num_devices]])
        return [Stopped(*each) for each, _ in rows]

    def gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        """With the stages of all ranks of this pipeline."""
        stages: dict[str, Any] = {}
        for row in self._world.groups.of_all_stages(state["stages"]):
            for key, each in row.items():
                waiting = {**stages.get(key, {}).get("waiting", {}), **each.get("waiting", {})}  # of all replicas
                stages[key] = {**each, "waiting": waiting} if "waiting" in each else each
        return {**state, "stages": stages}

    def broken_off(self) -> Sequence[Stopped]:
        """How far each stage has come, as far as it is known, when ranks can't ask each other."""
        assert self._device is not None
        self._watch.tally.tell(self._rank, self._device.at)
        news = self._watch.news
        gone = news is not None and news.kind in ("dead", "silent")
        known, devices = self._watch.tally.known(len(self._ranks) - gone), self._placement.stages
        return [
            Stopped(
                devices[place % len(devices)][0],
                rank,
                known.get(rank),
                is_torn=rank == self._rank and self._device.is_torn,
            )
            for place, rank in enumerate(self._ranks)
        ]

    def _is_lost(self, error: BaseException) -> bool:
        return isinstance(error, TransportError) or is_lost(error)
