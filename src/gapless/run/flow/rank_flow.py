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

import torch
from torch import Tensor

from gapless.errors import ConfigError, TransportError, noted_place
from gapless.run.flow.device import END, End, Fed, FlowDevice
from gapless.run.flow.same_batches import Batches
from gapless.run.flow.siblings import Alone, SiblingRanks, Siblings
from gapless.run.flow.stopped import Stopped
from gapless.run.flow.threads import Said
from gapless.run.lanes import CudaLane, Parcel
from gapless.run.ranks.agreement import differences
from gapless.run.ranks.footing import Footing
from gapless.run.ranks.watch.blame import in_short, is_lost
from gapless.run.ranks.wire.channel import PASSED, Incoming, Outgoing
from gapless.run.thread_state import CallerState

_LOG = logging.getLogger("gapless")
_END = "end"  # no activation and no gradient is a bare word


class RankNeighbours:
    """The ranks before and after, and the caller on this one."""

    def __init__(self, footing: Footing, parts: "queue.SimpleQueue[Fed | End]", said: Said, batches: Batches) -> None:
        seat, links = footing.seat, footing.links
        self._lane, self._parts, self._said = footing.lane, parts, said
        self.check = batches.check
        here, count = seat.device, seat.num_devices
        self._first, self._last = here == 0, here == count - 1
        links.connect(
            [
                channel
                for each in range(count - 1)
                for channel in ((each, each + 1, "activation"), (each + 1, each, "gradient"))
            ]
        )
        self._ups: Outgoing | None = None if self._first else links.outgoing(here - 1, "gradient")
        self._downs: Outgoing | None = None if self._last else links.outgoing(here + 1, "activation")
        self._from_before: Incoming | None = None if self._first else links.incoming(here - 1, "activation")
        self._from_after: Incoming | None = None if self._last else links.incoming(here + 1, "gradient")
        self._told = [links.outgoing(each, PASSED) for each in range(count - 1)] if self._last else []
        # In parcels, but for carriers that keep to a stream. In memory of the host, tensors go as they are.
        self._in_parcels = {
            end
            for end, other in ((self._from_before, here - 1), (self._downs, here + 1))
            if links.in_parcels and end is not None and not links.in_stream(other, "activation")
        } | {
            end
            for end, other in ((self._ups, here - 1), (self._from_after, here + 1))
            if links.in_parcels and end is not None and not links.in_stream(other, "gradient")
        }
        self._coming: set[Incoming] = set()
        self._going: set[Outgoing] = set()
        self._saying = False

    def begin(self) -> None:
        """Another flow."""
        self._coming = {each for each in (self._from_before, self._from_after) if each is not None}
        self._going = {each for each in (self._ups, self._downs) if each is not None}
        self._saying = self._last

    def next_part(self) -> Fed | End:
        part = self._parts.get()
        if isinstance(part, End) or not isinstance(self._lane, CudaLane):
            return part
        inputs = self._lane.unpack(Parcel(part.inputs, part.event, borrowed=True)) if self._first else None
        target = self._lane.unpack(Parcel(part.target, part.event, borrowed=True)) if self._last else None
        return Fed(inputs, target, part.weight)

    def next_activation(self) -> Any:
        return self._next(self._from_before)

    def next_gradient(self) -> Any:
        return self._next(self._from_after)

    def _next(self, incoming: Incoming | None) -> Any:
        assert incoming is not None
        if incoming not in self._coming:
            return END
        tree = incoming.get()
        if isinstance(tree, str):
            self._coming.discard(incoming)
            return END
        return self._lane.unpack(Parcel(tree)) if incoming in self._in_parcels else tree

    def hand_on(self, activation: Any) -> None:
        if self._downs is not None:
            self._hand(self._downs, activation, idle=True)  # what comes next needs a gradient
        elif self._saying:
            self._saying = False
            self._tell(_END)
            self._said.put((-1, None))

    def hand_back(self, gradient: Any) -> None:
        assert self._ups is not None
        self._hand(self._ups, gradient, idle=False)

    def _hand(self, outgoing: Outgoing, tree: Any, *, idle: bool) -> None:
        if tree is not END:
            if outgoing in self._in_parcels:
                outgoing.put(self._lane.pack(tree))
            elif idle:
                outgoing.put_now(tree)
            else:
                outgoing.put(tree)
        elif outgoing in self._going:
            self._going.discard(outgoing)
            with contextlib.suppress(RuntimeError):  # there may be nobody any more
                outgoing.hand(_END)

    def say(self, minibatch: int, loss: Tensor) -> None:
        if loss.is_cuda:
            torch.cuda.current_stream(loss.device).synchronize()
        self._said.put((minibatch, loss))
        self._tell([loss.detach()])

    def _tell(self, words: Any) -> None:
        for each in self._told:
            with contextlib.suppress(RuntimeError):
                each.hand(words)

    def settle(self) -> None:
        for incoming in (self._from_after, self._from_before):
            while incoming in self._coming:
                self._next(incoming)


class RankFlow:
    """Runs the device of this rank, and hears the losses from the last one."""

    def __init__(self, footing: Footing) -> None:
        self._footing, self._seat, self._watch = footing, footing.seat, footing.watch
        self._parts: queue.SimpleQueue[Fed | End] = queue.SimpleQueue()
        self.said: Said = queue.SimpleQueue()
        last = self._seat.num_devices - 1
        self._losses = None if self._seat.device == last else footing.links.incoming(last, PASSED)
        self._batches = Batches(footing)
        self._neighbours = RankNeighbours(footing, self._parts, self.said, self._batches)
        self._device: FlowDevice | None = None
        self._ranks = self._seat.ring  # those of one replica after those of another
        self._rank = self._seat.pp_ranks[self._seat.device]

    def siblings(self, parameters: Sequence[Tensor]) -> Siblings:
        """The same stage in other replicas of the pipeline."""
        group = self._footing.groups.dp
        return Alone() if group is None else SiblingRanks(group, parameters)

    def neighbours(self, device: int) -> RankNeighbours:
        """Of that device, which is the one here."""
        assert device == self._seat.device
        return self._neighbours

    def meet(self, facts: Mapping[str, Any], error: Exception | None) -> None:
        """All ranks are to do the same, and all can, or all refuse."""
        rows = self._footing.everywhere([facts, "" if error is None else in_short(error)])
        if error is not None:
            raise error
        for rank, (theirs, fault) in zip(self._ranks, rows, strict=True):
            if fault:
                raise ConfigError(f"rank {rank} can't go on with its stream: {fault}")
            for name, one, other in differences(rows[0][0], theirs):
                raise ConfigError(
                    f"the ranks disagree about their stream: {name} is {one} on rank {self._ranks[0]} and {other} on "
                    f"rank {rank}; all ranks make the same calls, with the same arguments"
                )

    def start(self, devices: Sequence[FlowDevice]) -> None:
        """The device runs until its rank or another one has ended the flow."""
        (device,) = devices
        for each in (self._parts, self.said):
            while not each.empty():
                each.get()
        self._device, state, lane = device, CallerState(), self._footing.lane
        self._neighbours.begin()
        self._batches.begin(device.updated)
        if isinstance(lane, CudaLane):
            lane.stream.wait_stream(torch.cuda.current_stream(lane.device))
        listening = threading.Thread(target=self._listen, args=(device.updated,), name="gapless losses", daemon=True)

        def run() -> None:
            listening.start()
            try:
                with lane.entered(), state.entered(), self._watch.whereabouts.flowing(device):
                    device.run()
                if device.failure is not None and self._is_lost(device.failure[1]):
                    self._watch.tally.tell(self._rank, device.updated)
            finally:
                listening.join()
                self.said.put((-1, None))

        self._watch.begun = True
        self._footing.team.flows = True
        self._footing.team.begin([run], lambda: self.feed(END))
        self._watch.whereabouts.call = ""  # the caller goes its way

    def _listen(self, minibatch: int) -> None:
        """To the last device, until it has no more to say."""
        if self._losses is None:
            return
        with contextlib.suppress(RuntimeError):  # the device knows why
            while not isinstance(words := self._losses.next(), str):
                self.said.put((minibatch, words[0].to(self._seat.torch_device)))
                minibatch += 1
        self.said.put((-1, None))

    def compare(self, minibatch: int, batch: Any) -> None:
        """With that of the rank at the other end of the pipeline, now and then."""
        self._batches.note(minibatch, batch)

    def feed(self, part: Fed | End) -> None:
        self._parts.put(part)

    def hear(self) -> tuple[int, Tensor | None]:
        """What is said next. A rank that was asked to leave does so between two minibatches."""
        if self._watch.was_asked():
            _LOG.warning("rank %d ends its stream and leaves: SIGTERM has come", self._rank)
            raise SystemExit(0)
        self._watch.whereabouts.call = "in a stream"
        try:
            return self.said.get()
        finally:
            self._watch.whereabouts.call = ""

    def finish(self, fed: int, why: str) -> Sequence[Stopped]:
        """Waits for the end of the device, and of those of all ranks."""
        assert self._device is not None
        self._watch.whereabouts.call = "draining its stream"
        self._footing.team.finish()
        self._footing.team.flows = False
        if isinstance(lane := self._footing.lane, CudaLane):
            torch.cuda.current_stream(lane.device).wait_stream(lane.stream)
        if self._device.failure is not None:
            error = self._device.failure[1]
            if self._is_lost(error):
                self._device.failure = None
                raise error
            why = f"failed {noted_place(error)}: {in_short(error)}"
        why = why and f"rank {self._rank} {why}"
        own = Stopped(self._seat.device, self._rank, self._device.updated, fed, why, self._device.is_torn)
        rows = self._footing.everywhere([own, self._batches.passed])
        self._batches.finish(rows[self._seat.replica * self._seat.num_devices][1])
        return [Stopped(*each) for each, _ in rows]

    def gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        """With the stages of all ranks of this pipeline."""
        stages = {key: each for row in self._footing.of_all_stages(state["stages"]) for key, each in row.items()}
        return {**state, "stages": stages}

    def broken_off(self) -> Sequence[Stopped]:
        """How far each stage has come, as far as it is known, when ranks can't ask each other."""
        assert self._device is not None
        self._watch.tally.tell(self._rank, self._device.updated)
        news = self._watch.news
        gone = news is not None and news.kind in ("dead", "silent")
        known, stages = self._watch.tally.known(len(self._ranks) - gone), self._seat.num_devices
        torn = {self._rank} if self._device.is_torn else set()
        return [
            Stopped(place % stages, rank, known.get(rank), is_torn=rank in torn)
            for place, rank in enumerate(self._ranks)
        ]

    def _is_lost(self, error: BaseException) -> bool:
        return isinstance(error, TransportError) or is_lost(error)
