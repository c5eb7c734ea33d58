"""Ranks of one pipeline stream one loader's batches: where they do not, nothing fails, and the numbers are wrong. As in
steps, fingerprints are compared, here without a meeting: the stream goes on.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gapless.errors import ConfigError
from gapless.run.ranks.consistency import fault_of_batches, is_compared, row_of
from gapless.run.ranks.many_processes import ManyProcesses
from gapless.run.ranks.wire.channel import PASSED
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
                raise ConfigError(fault)

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
