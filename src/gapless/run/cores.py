"""Where the threads of light devices run.

Devices that wait more than they compute (they launch kernels, or are emulated) need less than one core together, but
they wake on whichever core is free, and the interpreter's lock and the caches travel with them, which costs as much
again. Such threads are put on one core. It is tried and measured, run by run, each kind of run by itself: where one
lasts longer on one core than the quickest of its kind did on all of them, the threads are let go again, for twice as
long each time. What was measured long ago is measured again.
"""

import contextlib
import math
import os
import time
from collections.abc import Sequence
from threading import Thread

_LIGHT = 1.0  # cores that a run may use, while it runs on several, to be tried on one
_LONGER = 1.05
_LONG_AGO = 256  # runs


class Cores:
    """Decides after each run where the next one takes place. Does nothing where there is no choice."""

    def __init__(self) -> None:
        self._all: set[int] = set()
        self._gathered = False
        self._patience = 1  # how many light runs in a row it takes to try one core
        self._light = self._runs = 0
        self._quickest: dict[int, float] = {}  # in seconds, by kind, on all cores; the first is cold and does not count
        self._began = (0.0, 0.0)

    def begin(self, kind: int, threads: Sequence[Thread]) -> None:
        """A run of that kind is next."""
        if self._gathered and math.isinf(self._quickest.get(kind, math.inf)):
            self._place(threads, self._all)
        self._began = time.perf_counter(), time.process_time()

    def end(self, kind: int, threads: Sequence[Thread]) -> None:
        """It is over; these threads worked."""
        seconds = time.perf_counter() - self._began[0]
        busy = (time.process_time() - self._began[1]) / seconds
        self._runs += 1
        if self._gathered:
            if seconds > _LONGER * self._quickest[kind]:
                self._patience = min(2 * self._patience, 1024)
                self._place(threads, self._all)
            elif self._runs > _LONG_AGO:
                self._quickest.clear()
                self._place(threads, self._all)
            return
        known = self._quickest.get(kind)
        self._quickest[kind] = math.inf if known is None else min(known, seconds)
        if known is None:
            return
        self._light = self._light + 1 if busy < _LIGHT else 0
        if self._light >= self._patience:
            self._gather(threads)

    def _gather(self, threads: Sequence[Thread]) -> None:
        if not hasattr(os, "sched_setaffinity") or len(threads) < 2:
            return
        self._all = os.sched_getaffinity(0)
        if len(self._all) > 1:
            self._place(threads, {sorted(self._all)[os.getpid() % len(self._all)]})

    def _place(self, threads: Sequence[Thread], cores: set[int]) -> None:
        self._gathered, self._light, self._runs = len(cores) == 1, 0, 0
        for thread in threads:
            with contextlib.suppress(OSError):  # it has ended, or the system does not allow it
                os.sched_setaffinity(thread.native_id or 0, cores)
