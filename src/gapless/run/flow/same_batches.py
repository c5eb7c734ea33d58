"""Ranks of one pipeline stream one loader's batches: where they do not, nothing fails, and the numbers are wrong. As in
steps, fingerprints are compared, here without a meeting: the stream goes on.
"""

from typing import Any

from torch import Tensor

from gapless.errors import ConfigError
from gapless.run.ranks.footing import Footing
from gapless.run.ranks.sameness import fault_of_batches, is_compared, row_of
from gapless.run.ranks.wire.channel import PASSED


class Batches:
    """Whether the first and the last rank of a pipeline have the same: what the first has is sent along, and looked at
    where the last begins with the same minibatch. By then it is there, whatever has become of the first.
    """

    def __init__(self, footing: Footing) -> None:
        seat, links = footing.seat, footing.links
        first, last = 0, seat.num_devices - 1
        self._ranks = seat.pp_ranks[first], seat.pp_ranks[last]
        self._sends = links.outgoing(last, PASSED) if seat.device == first != last else None
        self._comes = links.incoming(first, PASSED) if seat.device == last != first else None
        self._own: dict[int, Tensor] = {}
        self.passed = 0  # rows sent, or read
        self._start = -1

    def begin(self, minibatch: int) -> None:
        """Another flow."""
        self._start = minibatch
        self._own.clear()
        self.passed = 0

    def note(self, minibatch: int, batch: Any) -> None:
        """The caller is about to feed it."""
        if (self._sends or self._comes) and (minibatch == self._start or is_compared(minibatch)):
            inputs, target = batch if isinstance(batch, list | tuple) and len(batch) == 2 else (batch, None)
            row = row_of(inputs, target, ())
            if self._sends is not None:
                self.passed += 1
                self._sends.hand([row])
            else:
                self._own[minibatch] = row

    def check(self, minibatch: int) -> None:
        """In the thread of the last device."""
        if self._comes is not None and (own := self._own.pop(minibatch, None)) is not None:
            theirs = self._comes.next()[0].cpu()
            self.passed += 1
            if fault := fault_of_batches(theirs, own, f"minibatch {minibatch} of a stream", *self._ranks):
                raise ConfigError(fault)

    def finish(self, sent: int) -> None:
        """The first has sent so many; what was never looked at is dropped."""
        while self._comes is not None and self.passed < sent:
            self._comes.next()
            self.passed += 1
