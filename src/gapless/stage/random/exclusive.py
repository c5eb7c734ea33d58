"""One thread at a time: what all threads share in torch, its default generators and the casts that autocast keeps.

A layer may run another pipeline, whose threads it then waits for. Where it holds the lock meanwhile, they have one of
their own, or all would wait for ever.
"""

import contextlib
import threading
from collections.abc import Iterator

Lock = threading.RLock
_everybodys = Lock()


class _Mine(threading.local):
    lock = _everybodys
    held = 0


mine = _Mine()


class _Exclusively(contextlib.AbstractContextManager[None]):
    def __enter__(self) -> None:
        mine.lock.acquire()
        mine.held += 1

    def __exit__(self, *_: object) -> None:
        mine.held -= 1
        mine.lock.release()


_exclusively = _Exclusively()


def exclusively() -> contextlib.AbstractContextManager[None]:
    """While it holds, no other thread is here."""
    return _exclusively


def is_held() -> bool:
    """Whether it is this thread that is here."""
    return mine.held > 0


class Heirs:
    """The lock for threads that this one will wait for."""

    def __init__(self) -> None:
        self._lock = Lock() if mine.held else mine.lock
        self.are_ordinary = self._lock is _everybodys  # it is the one that threads start with

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """In such a thread."""
        before, mine.lock = mine.lock, self._lock
        try:
            yield
        finally:
            mine.lock = before
