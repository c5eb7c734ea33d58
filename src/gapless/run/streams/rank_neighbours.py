"""The ranks around one device of a flow, which has a stage, or a replica of one.

    rank 0   parts -> F  --activation-->  rank 1   F  --activation-->  rank 2   F -> loss to all ranks
                      B  <--gradient----           B  <--gradient----           B

The word that nothing more comes travels both ways, exactly once over each channel, and from the last device to all
ranks with the losses.

A stage may have replicas, each on a rank, which take turns: which rank has a minibatch is a matter of its number. What
comes from the replicas of another stage comes in the order of numbers then, and so does what goes to them:

    rank 0   F0      F3      F6  ...     to rank 3
    rank 1     F1      F4        ...     to rank 3
    rank 2       F2      F5      ...     to rank 3
    rank 3     F0 F1 F2 F3 F4 F5 ...     from ranks 0, 1, 2, 0, 1, 2, ...

Ranks of one pipeline stream one loader's batches: where they do not, nothing fails, and the numbers are wrong. As in
steps, fingerprints are compared, here without a meeting: the stream goes on.
"""

import contextlib
import itertools
import queue
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import Any, TypeVar

from torch import Tensor

from gapless.run.lanes import CudaLane, Parcel
from gapless.run.ranks.fingerprints import fault_of_batches, is_compared, row_of
from gapless.run.ranks.many_processes import ManyProcesses
from gapless.run.ranks.wire.channel import PASSED, Incoming, Outgoing
from gapless.run.streams.stream_device import END, End, Fed, StreamDevice
from gapless.run.streams.stream_runner import Said
from gapless.schedule.placement import Placement


class BatchComparison:
    """Whether the first and the last rank of a pipeline have the same: what the first has is sent along, and looked at
    where the last begins with the same minibatch. By then it is there, whatever has become of the first. Where these
    stages have replicas, it is those of the minibatch.
    """

    def __init__(self, world: ManyProcesses, placement: Placement) -> None:
        position, links, self._placement = world.position, world.links, placement
        self._device, self._ranks, self._stages = position.device, position.pp_ranks, placement.num_stages
        first, last = placement.cycles[0], placement.cycles[-1]
        others = first != last
        self._sends = {each: links.outgoing(each, PASSED) for each in last if others and self._device in first}
        self._comes = {each: links.incoming(each, PASSED) for each in first if others and self._device in last}
        self._own: dict[int, Tensor] = {}
        self._often = max(len(first), len(last))  # so that each of these is in the first comparisons
        self.passed = [0] * position.num_devices  # rows sent to a device, or read from it
        self._start = self._origin = 0

    def begin(self, minibatch: int, origin: int) -> None:
        """Another flow, which begins there; replicas take turns from `origin` on."""
        self._start, self._origin = minibatch, origin
        self._own.clear()
        self.passed = [0] * len(self.passed)

    def note(self, minibatch: int, batch: Any) -> None:
        """The caller is about to feed it."""
        if not (self._sends or self._comes) or not (minibatch - self._start < self._often or is_compared(minibatch)):
            return
        source, target = self._ends(minibatch)
        if self._device in (source, target):
            inputs, answers = batch if isinstance(batch, list | tuple) and len(batch) == 2 else (batch, None)
            row = row_of(inputs, answers, ())
            if self._device == target:
                self._own[minibatch] = row
            else:
                self.passed[target] += 1
                self._sends[target].hand([row])

    def check(self, minibatch: int) -> None:
        """In the thread of the last device."""
        if self._comes and (own := self._own.pop(minibatch, None)) is not None:
            source, target = self._ends(minibatch)
            theirs = self._comes[source].next()[0].cpu()
            self.passed[source] += 1
            ranks = self._ranks[source], self._ranks[target]
            if fault := fault_of_batches(theirs, own, f"minibatch {minibatch} of a stream", *ranks):
                raise fault

    def _ends(self, minibatch: int) -> tuple[int, int]:
        """The devices that take its inputs and its targets."""
        number = minibatch - self._origin
        return self._placement.device(0, number), self._placement.device(self._stages - 1, number)

    def finish(self, passed: Sequence[Sequence[int]]) -> None:
        """These are the counts of all devices; what was never looked at is dropped."""
        for source, incoming in self._comes.items():
            while self.passed[source] < passed[source][self._device]:
                incoming.next()
                self.passed[source] += 1


_END = "end"  # no activation and no gradient is a bare word
Side = TypeVar("Side", Incoming, Outgoing)


class RankNeighbours:
    """The ranks before and after, and the caller on this one."""

    def __init__(
        self,
        world: ManyProcesses,
        placement: Placement,
        parts: "queue.SimpleQueue[Fed | End]",
        said: Said,
        batches: BatchComparison,
    ) -> None:
        position, links, cycles = world.position, world.links, placement.cycles
        self._lane, self._parts, self._said, self._cycles = world.lane, parts, said, cycles
        self.check = batches.check
        here, self._stage = position.device, placement.stages[position.device][0]
        self._first, self._last = self._stage == 0, self._stage == len(cycles) - 1
        links.connect(
            [
                channel
                for before, after in pairwise(cycles)
                for one, other in product(before, after)
                for channel in ((one, other, "activation"), (other, one, "gradient"))
            ]
        )
        before = () if self._first else cycles[self._stage - 1]
        after = () if self._last else cycles[self._stage + 1]
        self._ups: dict[int, Outgoing] = {each: links.outgoing(each, "gradient") for each in before}
        self._downs: dict[int, Outgoing] = {each: links.outgoing(each, "activation") for each in after}
        self._from_before: dict[int, Incoming] = {each: links.incoming(each, "activation") for each in before}
        self._from_after: dict[int, Incoming] = {each: links.incoming(each, "gradient") for each in after}
        others = [each for each in range(position.num_devices) if each != here]
        self._told = [links.outgoing(each, PASSED) for each in others] if self._last else []
        # In parcels, but for carriers that keep to a stream. In memory of the host, tensors go as they are.
        self._in_parcels = {
            end
            for ends, kind in (
                (self._from_before, "activation"),
                (self._downs, "activation"),
                (self._ups, "gradient"),
                (self._from_after, "gradient"),
            )
            for other, end in ends.items()
            if links.in_parcels and not links.in_stream(other, kind)
        }
        self._coming: set[Incoming] = set()
        self._going: set[Outgoing] = set()
        self._saying = False

    def begin(self, device: StreamDevice) -> None:
        """Another flow: which neighbour has this device's next minibatch, and which those after it."""
        self._coming = {*self._from_before.values(), *self._from_after.values()}
        self._going = {*self._ups.values(), *self._downs.values()}
        self._saying = self._last
        self._sources, self._back_to = self._in_turn(self._from_before, device), self._in_turn(self._ups, device)
        self._targets, self._back_from = self._in_turn(self._downs, device), self._in_turn(self._from_after, device)

    def _in_turn(self, ends: Mapping[int, Side], device: StreamDevice) -> Iterator[Side]:
        """The ends of channels to the replicas of a stage, as their minibatches come to this device."""
        rule, cycle = device.rule, list(ends)
        numbers = (rule.number(device.next + later) - rule.origin[0] for later in range(len(cycle)))
        return itertools.cycle([ends[cycle[number % len(cycle)]] for number in numbers])

    def next_part(self) -> Fed | End:
        part = self._parts.get()
        if isinstance(part, End) or not isinstance(self._lane, CudaLane):
            return part
        return part.unpacked(self._lane, first=self._first, last=self._last)

    def next_activation(self) -> Any:
        return self._next(next(self._sources))

    def next_gradient(self) -> Any:
        return self._next(next(self._back_from))

    def _next(self, incoming: Incoming) -> Any:
        if incoming not in self._coming:
            return END
        tree = incoming.get()
        if isinstance(tree, str):
            self._coming.discard(incoming)
            return END
        return self._lane.unpack(Parcel(tree)) if incoming in self._in_parcels else tree

    def hand_on(self, activation: Any) -> None:
        if activation is END:
            self._end(self._downs)
            if self._saying:
                self._saying = False
                self._tell(_END)
                self._said.put((-1, None))
        else:
            self._hand(next(self._targets), activation, idle=True)  # what comes next needs a gradient

    def hand_back(self, gradient: Any) -> None:
        if gradient is END:
            self._end(self._ups)
        else:
            self._hand(next(self._back_to), gradient, idle=False)

    def _hand(self, outgoing: Outgoing, tree: Any, *, idle: bool) -> None:
        if outgoing in self._in_parcels:
            outgoing.put(self._lane.pack(tree))
        elif idle:
            outgoing.put_now(tree)
        else:
            outgoing.put(tree)

    def _end(self, ends: Mapping[int, Outgoing]) -> None:
        for outgoing in self._going.intersection(ends.values()):
            self._going.discard(outgoing)
            with contextlib.suppress(RuntimeError):  # there may be nobody any more
                outgoing.hand(_END)

    def say(self, minibatch: int, loss: Tensor) -> None:
        self._said.put((minibatch, loss))
        self._tell([loss.detach()])

    def _tell(self, words: Any) -> None:
        for each in self._told:
            with contextlib.suppress(RuntimeError):
                each.hand(words)

    def settle(self) -> None:
        for incoming in (*self._from_after.values(), *self._from_before.values()):
            while incoming in self._coming:
                self._next(incoming)
