"""Ranks that make different calls would take each other's messages, or wait for each other for ever.

    messages    carry a stamp: which call, of which kind, with which arguments (`Stamp`); others are refused
    meetings    begin with a comparison of the stamps, the same in every call, before anything else is exchanged
    waits       a call that lasts is said to the neighbours in the ring, who compare it with their own (`RollCall`)

Modes (train or eval) are those of all modules of the model: whoever changes them does so on every rank.
"""

import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from gapless.errors import TransportError
from gapless.run.program import Program
from gapless.run.ranks.consistency import Consistency
from gapless.run.ranks.watch.blame import is_lost
from gapless.run.ranks.watch.watch import Watch
from gapless.run.ranks.wire.connections import Connections
from gapless.stage.share import Share

_CARRIED = ("in a step", "evaluating")


class SameCalls:
    """Those of one rank."""

    def __init__(self, watch: Watch, links: Connections, sameness: Consistency, *, has_replicas: bool) -> None:
        self._watch, self._links, self._sameness, self._has_replicas = watch, links, sameness, has_replicas
        self.stamp = links.courier.stamp
        self._process = os.getpid()
        self._modules: list[dict[str, object]] = []

    def adopt(self, module: nn.Module) -> None:
        """The model."""
        self._modules = [each.__dict__ for each in module.modules()]

    @contextmanager
    def call(
        self, doing: str, numbers: tuple[float, float] = (0.0, 0.0), *, leaves: bool = True, meet: bool = True
    ) -> Iterator[None]:
        """Around everything that all ranks do together; without `meet` those of one replica do. The numbers are
        arguments, the same on all ranks.
        """
        watch = self._watch
        if os.getpid() != self._process:
            raise TransportError(
                f"process {os.getpid()} is a forked child of rank {watch.me} (process {self._process}) and has "
                "no connection to the other ranks: make this call in the rank itself, on every rank"
            )
        watch.check()
        failure = self._links.courier.failure
        if failure is not None and is_lost(failure):
            raise watch.lost(None, failure) from None
        self._links.check()
        with watch.call(doing, leaves=leaves, meet=meet or not self._has_replicas):
            self.stamp.begin(watch.roll.number, doing, *numbers)
            yield

    def start(self, doing: str) -> None:
        """In a call. Steps and evaluations meet in the first one only: their messages say what they are."""
        if not self._sameness.started or doing not in _CARRIED:
            self.meet(self._sameness.check_start)

    def meet(self, check: Callable[[], object] | None = None) -> None:
        """All ranks are in this call, or all refuse; also what is checked they refuse together."""
        with self._watch.roll.meeting():
            (check or self._sameness.agreed)()

    def begin(self, program: Program, share: Share) -> None:
        """What the program is to do is known now, and nothing was sent yet."""
        modes = bytes([bool(own.get("training", True)) for own in self._modules])
        self.stamp.detail(
            float(share.weight),
            program.schedule.num_microbatches,
            zlib.crc32(modes),
            sync=share.sync,
            timeline=program.recorded,
            trains=modes[:1] == b"\1",
        )
