"""What this rank is doing, in words that its own errors and other ranks' can use. Read from any thread, at any time."""

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

from gapless.run.program import Program
from gapless.run.ranks.wire.connections import Connections
from gapless.schedule.action import Action
from gapless.schedule.routes import messages

MAKING = "making its pipeline"


class Flowing(Protocol):
    """A device that goes on from minibatch to minibatch, without a program."""

    @property
    def idle(self) -> bool:
        """It waits for its caller."""

    def place(self) -> str:
        """Where it is, in words."""


class Whereabouts:
    """Of one rank, which has no connections while it makes its pipeline."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.call = MAKING  # that is under way, such as a step; parts of it are outside of any action
        self.connections: Connections | None = None
        self._program: Program | None = None
        self._running = False
        self._flow: Flowing | None = None
        self.microbatches = 0  # of the last run
        self.seconds = 0.0
        self.waited = 0.0  # for other ranks

    @contextlib.contextmanager
    def running(self, program: Program) -> Iterator[None]:
        """The actions of a program."""
        assert self.connections is not None
        waiting = self.connections.waiting
        waiting.since = None
        self._program, self._running = program, True
        self.microbatches = program.schedule.num_microbatches
        waited, began = waiting.seconds, time.monotonic()
        try:
            yield
        finally:
            self._running = False
            self.seconds = time.monotonic() - began
            self.waited = waiting.seconds - waited + getattr(program.batch.weights, "waited", 0.0)

    @contextlib.contextmanager
    def flowing(self, device: Flowing) -> Iterator[None]:
        """Minibatches follow each other through this device."""
        assert self.connections is not None
        self.connections.waiting.since = None
        self._flow = device
        try:
            yield
        finally:
            self._flow = None

    def words(self) -> str:
        """As a sentence: rank 2 (device 2) waited for ..."""
        made = self.connections
        me = f"rank {self.rank}" if made is None else f"rank {self.rank} (device {made.device})"
        incoming, since = (None, None) if made is None else (made.waiting.channel, made.waiting.since)
        if made is None or incoming is None or since is None:
            return f"{me} was {self.last()}"
        source, kind, action = incoming.source, incoming.kind, self._action() if self._running else None
        uses = {} if self._program is None else messages(self._program.schedule)[1]
        wanted = [message for message, user in uses.get((source, made.device, kind), ()) if user == action]
        words = f"{me} waited {time.monotonic() - since:.1f} s for the {kind}"
        if wanted:
            words += f" of stage {wanted[0][0]}, microbatch {wanted[0][1]}, which {action} needs,"
        words += f" from rank {made.ranks[source]} (device {source})"
        return words if wanted else f"{words}, {self.last()}"

    def last(self) -> str:
        """The last action, in short."""
        if (flow := self._flow) is not None:
            return f"in a stream, {flow.place()}"
        action = self._action()
        if action is None:
            return self.call or "before its first step"
        place = f"stage {action.stage}, action {action}"
        if self._running:
            return f"at {place}"
        return f"{self.call or 'between two calls'}, after {place}"

    def progress(self) -> object:
        """None while something is computed; otherwise it changes whenever something has happened."""
        since = None if self.connections is None else self.connections.waiting.since
        if self.connections is None or (self._running and since is None):
            return None
        if (flow := self._flow) is not None:
            return None if since is None and not flow.idle else (since, flow.place(), self.call)
        return since, self._running, self._action(), self.call

    def _action(self) -> Action | None:
        if self._program is None or self.connections is None:
            return None
        device = self.connections.device
        row = self._program.schedule.rows[device]
        return row[self._program.reached[device]] if row else None
