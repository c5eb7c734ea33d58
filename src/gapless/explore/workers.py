"""Processes that make the answers, one question each at a time: a long search holds up nobody else, and can be ended.

They are started when there is something to do and none is idle. A question that takes too long, or that nobody waits
for any more, takes its process with it.
"""

import json
import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from gapless.errors import ConfigError, GaplessError
from gapless.explore.question import Question, answer, command_of

MOST = max(3, min(8, os.cpu_count() or 1))
SECONDS = 20.0  # for one question
_LOOK = 0.2  # seconds between looks at whether somebody still waits


class ClientGoneError(Exception):
    """Nobody waits for the answer."""


class _Worker(NamedTuple):
    process: BaseProcess
    connection: Connection

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class Workers:
    """Up to `MOST` of them."""

    def __init__(self) -> None:
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()  # None: one that may be started
        for _ in range(MOST):
            self._idle.put(None)
        self._alive: set[_Worker] = set()
        self._starting = threading.Lock()
        self._closed = False

    @property
    def busy(self) -> int:
        return MOST - self._idle.qsize()

    @property
    def alive(self) -> list[BaseProcess]:
        return [worker.process for worker in list(self._alive)]

    def answer(self, question: Question, client: socket.socket) -> str:
        """The answer as JSON. Raises ConfigError where it takes too long."""
        worker = self._taken(client)
        try:
            worker = worker or self._started()
            text = _asked(worker.connection, question, client)
        except BaseException:
            if worker is not None:
                self._alive.discard(worker)
                worker.end()
            self._idle.put(None)
            raise
        self._idle.put(worker)
        return text

    def _taken(self, client: socket.socket) -> _Worker | None:
        while True:
            with suppress(queue.Empty):
                return self._idle.get(timeout=_LOOK)
            if wait([client], 0) and _is_gone(client):
                raise ClientGoneError

    def _started(self) -> _Worker:
        spawned = multiprocessing.get_context("spawn")
        ours, theirs = spawned.Pipe()
        process = spawned.Process(target=_work, args=(theirs,), daemon=True)
        with self._starting:
            if self._closed:
                raise ClientGoneError
            with _without_ctrl_c():
                process.start()
            theirs.close()
            worker = _Worker(process, ours)
            self._alive.add(worker)
        with suppress(EOFError, OSError):  # its end is told when it is asked
            ours.recv()  # it is ready: only from here on its time counts
        return worker

    def close(self) -> None:
        """Ends them all, whatever they are at."""
        with self._starting:  # one that is ended half started would say so
            self._closed = True
            for process in self.alive:
                process.kill()


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Ctrl-C is for the server, which ends the processes that are started here; they inherit what is blocked."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # the first process brings it, and where it starts, nothing is blocked any more
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _asked(connection: Connection, question: Question, client: socket.socket) -> str:
    until = time.monotonic() + SECONDS
    with suppress(OSError):
        connection.send(question)
    watched: list[Connection | socket.socket] = [connection, client]
    while ready := wait(watched, max(0.0, until - time.monotonic())):
        if connection in ready:
            try:
                return str(connection.recv())
            except (EOFError, OSError):
                raise ConfigError(
                    f"the process that made {question.schedule} was killed: run `{command_of(question)}` instead"
                ) from None
        if _is_gone(client):
            raise ClientGoneError
        watched.remove(client)  # it says something else already
    raise ConfigError(
        f"{question.schedule} was not found within {SECONDS:g} s, so the search was stopped: use fewer devices or "
        f"microbatches, or run `{command_of(question)}`"
    )


def _is_gone(client: socket.socket) -> bool:
    """Of one from which there is something to read."""
    try:
        return not client.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def _work(connection: Connection) -> None:
    """Until the server ends."""
    with suppress(EOFError, OSError):
        connection.send("ready")
        while True:
            question = connection.recv()
            try:
                found = answer(question)
            except GaplessError as error:
                found = {"error": str(error)}
            connection.send(json.dumps(found))
