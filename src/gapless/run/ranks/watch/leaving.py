"""SIGTERM: the step under way is finished and all ranks leave together, instead of one vanishing in the middle of it.

The handler only takes a note. A handler of the user's own is left alone. A forked child has none of ours: there nobody
would read the note, and `multiprocessing` ends its daemons with this signal.
"""

import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType

from gapless.run.ranks.watch.children import tell_in_child
from gapless.run.ranks.watch.ring import Ring, Words

_AGAIN = 2.0  # seconds after which a second signal is meant
_ROUND_WITHIN = 5.0


class Terminating:
    """Our handler, while there are pipelines that will see the note."""

    def __init__(self) -> None:
        self.asked = False
        self._since = 0.0
        self._users = 0

    @classmethod
    def installed(cls) -> "Terminating | None":
        """None where somebody else takes care of the signal, or where it can't be done: off the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return None
        there = signal.getsignal(signal.SIGTERM)
        if there is signal.SIG_DFL:
            there = cls()
            signal.signal(signal.SIGTERM, there)
            tell_in_child(there)
        if not isinstance(there, cls):
            return None
        there._users += 1
        return there

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.asked:
            self.asked, self._since = True, now
        if now - self._since > _AGAIN or self._users == 0:
            self._restore()
            os.kill(os.getpid(), signum)

    def in_child(self) -> None:
        self._restore()

    def leave(self) -> None:
        """The last pipeline puts back what was there."""
        self._users -= 1
        if self._users == 0:
            self._restore()

    def _restore(self) -> None:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is self:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Departure:
    """When this rank leaves with all others, and who was asked to."""

    def __init__(self, ranks: Sequence[int], me: int, ring: Ring) -> None:
        self._ranks, self._me, self._ring = ranks, me, ring
        self.asked_by: int | None = None  # whom SIGTERM came to
        self._before: int | None = None  # the call that no rank begins
        self._round = threading.Event()
        self._terminating = Terminating.installed()

    def was_asked(self) -> bool:
        """Some rank has received SIGTERM: sooner or later every rank says so."""
        if self.asked_by is None and self._terminating is not None and self._terminating.asked:
            self._ask(self._me)
        return self.asked_by is not None

    def _ask(self, rank: int) -> None:
        if self.asked_by is None:
            self.asked_by = rank
            self._ring.say({"asked": rank})

    def settle(self, calls: int) -> None:
        """The first rank picks the call before which all leave, and goes on when everybody knows.

        Nobody can end a call that the first rank has not begun, so nobody is beyond the next one.
        """
        if self.was_asked() and self._before is None and self._me == self._ranks[0]:
            self._before = calls + (len(self._ranks) > 1)
            if self._ring.neighbours:
                self._pass_on({"leave": self._before, "for": self.asked_by})
                self._round.wait(_ROUND_WITHIN)

    def hear(self, words: Words) -> None:
        """From a neighbour: that somebody was asked, or before which call all leave."""
        if "asked" in words:
            self._ask(words["asked"])
            return
        self.asked_by, self._before = words["for"], words["leave"]
        if self._me == self._ranks[0]:
            self._round.set()
        else:
            self._pass_on(words)

    def _pass_on(self, words: Words) -> None:
        """To the next rank of the ring."""
        after = self._ranks[(self._ranks.index(self._me) + 1) % len(self._ranks)]
        next(neighbour for neighbour in self._ring.neighbours if neighbour.rank == after).say(words)

    def is_due(self, calls: int) -> bool:
        """No rank will begin another step."""
        return self._before is not None and calls >= self._before

    def close(self) -> None:
        if self._terminating is not None:
            self._terminating.leave()
