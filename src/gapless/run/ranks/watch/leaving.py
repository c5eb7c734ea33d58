"""SIGTERM: the step under way is finished and all ranks leave together, instead of one vanishing in the middle of it.

The handler only takes a note. A handler of the user's own is left alone. A forked child has none of ours: there nobody
would read the note, and `multiprocessing` ends its daemons with this signal.
"""

import os
import signal
import threading
import time
from types import FrameType

from gapless.run.ranks.watch.children import tell_in_child

_AGAIN = 2.0  # seconds after which a second signal is meant


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
