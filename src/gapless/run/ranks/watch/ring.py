"""A connection from every rank to the next, in a ring, which carries nothing but words: signs of life, and news.

    rank 0 --- rank 1 --- rank 2 --- rank 3 --- (rank 0)

Nothing else ever closes such a connection, so one that is closed without a goodbye means that the process at its other
end is dead, whatever this one is doing at that moment. News travel both ways round, so they pass a rank that sleeps.
A child that is forked has the connection too, and would keep it open when its parent is dead: it closes its copy.
"""

import contextlib
import ctypes
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from gapless.run.ranks.watch.processes import Life

_SIZE = 2048  # bytes of every message
_TAG = 2
_AHEAD = 8  # receives posted: a message leaves at once only if the other end has posted one
_UNANSWERED = 3  # signs of life to one that says nothing: whatever else is said must find a receive that is posted
_A_WHILE = timedelta(milliseconds=500)
_NEVER = timedelta(days=365)
_SHORTER = (400, 200, 100, 50, 25)  # characters that are left of each text, if a message is too long
_LAST_WORDS = 0.5  # seconds after the end of a process in which a goodbye may still come
_DESCRIPTORS = "/proc/self/fd"

Words = dict[str, Any]


class Neighbour:
    """The rank at the other end of a connection, and the thread that listens to it."""

    def __init__(
        self,
        rank: int,
        connect: Callable[[], Any],
        hear: Callable[["Neighbour", Words], None],
        lose: Callable[["Neighbour"], None],
    ) -> None:
        before = _sockets()
        group = connect()
        self._socket = _only_new(before)
        if self._socket is not None:
            os.set_inheritable(self._socket[0], False)  # a program that is started must not keep it open either
        self.rank = rank
        self.life: Life | None = None  # of its process, where that can be seen
        self._ended: float | None = None  # when its process was seen to be dead
        self.heard = time.monotonic()
        self.last: Words = {}  # its last sign of life
        self.left: str | None = None  # has said goodbye, and why
        self._group, self._other = group, 1 - group.rank()
        self._hear, self._lose = hear, lose
        self._lock = threading.Lock()
        self._sent: deque[tuple[Any, Any]] = deque(maxlen=2 * _AHEAD)  # must stay until they have left
        self._unanswered = 0
        self._thread = threading.Thread(target=self._listen, name=f"gapless hears rank {rank}", daemon=True)
        self._thread.start()

    def say(self, words: Words, *, beat: bool = False) -> None:
        """Does not wait. There is no more than a few signs of life to one that does not answer."""
        with self._lock, contextlib.suppress(RuntimeError):  # closed: whoever listens finds out
            if self._group is None or (beat and self._unanswered >= _UNANSWERED):
                return
            self._unanswered += beat
            message = torch.frombuffer(bytearray(encoded(words).ljust(_SIZE)), dtype=torch.uint8)
            self._sent.append((self._group.send([message], self._other, _TAG), message))

    def has_ended(self, now: float) -> bool:
        """Whether its process has, and no goodbye can come any more."""
        if self._ended is None and self.life is not None and self.life.is_over:
            self._ended = now
        return self._ended is not None and now - self._ended >= _LAST_WORDS

    def _listen(self) -> None:
        posted: deque[tuple[Any, Any]] = deque()
        for _ in range(_AHEAD):
            self._post(posted)
        with contextlib.suppress(RuntimeError):
            while posted:
                work, buffer = posted.popleft()
                work.wait(_NEVER)
                self.heard, self._unanswered = time.monotonic(), 0
                self._post(posted)
                with contextlib.suppress(ValueError):  # what can't be read says at least that somebody is there
                    self._hear(self, json.loads(ctypes.string_at(buffer.data_ptr(), _SIZE)))
        self._lose(self)

    def _post(self, posted: deque[tuple[Any, Any]]) -> None:
        """Where that can't be done any more, what has come already is still there to be heard."""
        buffer = torch.empty(_SIZE, dtype=torch.uint8)
        with contextlib.suppress(RuntimeError):
            posted.append((self._group.recv([buffer], self._other, _TAG), buffer))

    def in_child(self) -> None:
        """Closes the copy of the connection that a forked child has."""
        if self._socket is not None and self._socket in _sockets():
            os.close(self._socket[0])

    def close(self) -> None:
        """What was said leaves first. What is broken off ends the thread."""
        with contextlib.suppress(RuntimeError):
            if self._sent:
                self._sent[-1][0].wait(_A_WHILE)
        self._group.break_off()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        with self._lock:
            self._sent.clear()
            self._group = None


class Ring:
    """The rank before and the rank after."""

    def __init__(self) -> None:
        self.neighbours: list[Neighbour] = []

    def say(self, words: Words, *, beat: bool = False) -> None:
        """To both. Does not wait."""
        for neighbour in self.neighbours:
            neighbour.say(words, beat=beat)


def encoded(words: Words) -> bytes:
    """No longer than a message, whatever the texts in it."""
    for most in (None, *_SHORTER):
        data = json.dumps(_shortened(words, most), ensure_ascii=False).encode(errors="replace")
        if len(data) <= _SIZE:
            return data
    raise AssertionError(f"{len(data)} bytes of words without a long text")


def _shortened(words: Any, most: int | None) -> Any:
    if isinstance(words, dict):
        return {name: _shortened(value, most) for name, value in words.items()}
    if isinstance(words, str) and most is not None and len(words) > most:
        return f"{words[:most]}..."
    return words


def _sockets() -> set[tuple[int, str]]:
    """The file descriptors of this process that are sockets, with what tells one from another of the same number."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError):  # the one by which the names were read
                link = os.readlink(f"{_DESCRIPTORS}/{name}")
                if link.startswith("socket:"):
                    found.add((int(name), link))
    return found


def _only_new(before: set[tuple[int, str]]) -> tuple[int, str] | None:
    """The connection that was made since. None if another thread has made one in the same moment: nobody else's is
    ever closed.
    """
    new = [one for one in _sockets() - before if _is_connected(one[0])]
    return new[0] if len(new) == 1 else None


def _is_connected(descriptor: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            copy.getpeername()
            return copy.family in (socket.AF_INET, socket.AF_INET6)
    except OSError:
        return False


def pairs(ranks: Sequence[int], me: int) -> list[tuple[int, int]]:
    """Those with the rank before and the rank after, in the order in which they are to be connected: even ones first,
    then odd ones, and the last of an odd number last. If each began with the one before, all would wait in a circle.
    """
    here, count = ranks.index(me), len(ranks)
    edges = {(here - 1) % count, here} if count > 2 else {0} if count == 2 else set()
    order = sorted(edges, key=lambda edge: 2 if edge == count - 1 and count % 2 else edge % 2)
    return [(ranks[edge], ranks[(edge + 1) % count]) for edge in order]
