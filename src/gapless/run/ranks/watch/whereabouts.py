"""What this rank is doing, in words that its own errors and other ranks' can use. Read from any thread, at any time."""

import contextlib
import time
from collections.abc import Callable, Iterator

from gapless.run.program import Program
from gapless.run.ranks.wire.connections import Connections
from gapless.schedule.action import Action
from gapless.schedule.routes import messages


class Whereabouts:
    """`call` names the call that is under way, such as a step, or is empty; parts of it are outside of any action."""

    def __init__(self, links: Connections, call: Callable[[], str]) -> None:
        self._links, self._call = links, call
        self._program: Program | None = None
        self._running = False
        self.microbatches = 0  # of the last run
        self.seconds = 0.0
        self.waited = 0.0  # for other ranks

    @contextlib.contextmanager
    def running(self, program: Program) -> Iterator[None]:
        """The actions of a program."""
        self._links.waiting.since = None
        self._program, self._running = program, True
        self.microbatches = program.schedule.num_microbatches
        waited, began = self._links.waiting.seconds, time.monotonic()
        try:
            yield
        finally:
            self._running = False
            self.seconds = time.monotonic() - began
            self.waited = self._links.waiting.seconds - waited + getattr(program.batch.weights, "waited", 0.0)

    def words(self) -> str:
        links, me = self._links, f"rank {self._links.rank} (device {self._links.device})"
        incoming, since = links.waiting.channel, links.waiting.since
        if incoming is None or since is None:
            return f"{me} was {self.last()}"
        source, kind, action = incoming.source, incoming.kind, self._action() if self._running else None
        uses = {} if self._program is None else messages(self._program.schedule)[1]
        wanted = [message for message, user in uses.get((source, links.device, kind), ()) if user == action]
        words = f"{me} waited {time.monotonic() - since:.1f} s for the {kind}"
        if wanted:
            words += f" of stage {wanted[0][0]}, microbatch {wanted[0][1]}, which {action} needs,"
        words += f" from rank {links.ranks[source]} (device {source})"
        return words if wanted else f"{words}, {self.last()}"

    def last(self) -> str:
        action, call = self._action(), self._call()
        if action is None:
            return call or "before its first step"
        place = f"stage {action.stage}, action {action}"
        if self._running:
            return f"at {place}"
        return f"{call or 'between two calls'}, after {place}"

    def progress(self) -> object:
        """None while an action computes; otherwise it changes whenever something has happened."""
        since = self._links.waiting.since
        return None if self._running and since is None else (since, self._running, self._action(), self._call())

    def _action(self) -> Action | None:
        program = self._program
        if program is None:
            return None
        device = self._links.device
        row = program.schedule.rows[device]
        return row[program.reached[device]] if row else None
