"""One persistent thread per device."""

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from gapless.errors import TransportError
from gapless.stage.intra_op import set_intra_op_threads

Task = Callable[[], object]


class Team:
    """The threads. They start at the first use, keep nothing alive between two uses, and end with `close`."""

    def __init__(self, names: Sequence[str], intra_op_threads: int) -> None:
        self._names = names
        self._intra_op_threads = intra_op_threads
        self._closed = False
        self._holders: set[object] = set()
        self.flows = False  # what is under way ends only when it is told to
        self.left: Callable[[], None] | None = None  # clears up after a run that was not cleared up after
        self._begin()

    def _begin(self) -> None:
        """Without threads, in this process."""
        self._process = os.getpid()
        self._inboxes: list[queue.SimpleQueue[Task | None]] = [queue.SimpleQueue() for _ in self._names]
        self._threads: list[threading.Thread] = []
        self._under_way: tuple[_Latch, list[Task], Callable[[], None]] | None = None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """One step at a time: another one, from a second thread or from inside a layer, would mix with it or hang."""
        if self._process != os.getpid():  # a forked child has everything but the threads
            if self._holders:
                raise TransportError(
                    f"process {os.getpid()} was forked from process {self._process} in the middle of a step, and it "
                    "has only a part of it: fork between two steps, or make a pipeline in the child"
                )
            self._begin()
        me = object()
        try:
            self._holders.add(me)  # Ctrl-C may come between any two calls, so there is nothing to undo but this one
            if len(self._holders) > 1:
                raise TransportError(
                    "the pipeline is in the middle of another step: wait for its end, or give each thread its own "
                    "pipeline"
                )
            yield
        finally:
            self._holders.discard(me)

    @property
    def works_here(self) -> bool:
        """Whether the calling thread is one of these."""
        return threading.current_thread() in self._threads

    @property
    def busy(self) -> bool:
        """A step is under way."""
        return bool(self._holders)

    def run(self, tasks: Iterable[Task], stop: Callable[[], None]) -> None:
        """One task per thread, to its end. Ctrl-C stops them, waits for them, and goes on to the caller."""
        self.begin(tasks, stop)
        self.finish()

    def begin(self, tasks: Iterable[Task], stop: Callable[[], None]) -> None:
        """One task per thread; what the caller does meanwhile ends with `finish`."""
        if self._closed:
            raise TransportError("the pipeline is closed; make a new one")
        if len(self._threads) < len(self._names):
            self._start()
        latch = _Latch(len(self._inboxes))
        counted = [latch.counted(task) for task in tasks]
        self._under_way = latch, counted, stop
        try:
            self._hand_out(counted)
        except BaseException:
            self.settle()
            raise

    def finish(self) -> None:
        """All tasks to their end."""
        if self._under_way is None:
            return
        try:
            self._under_way[0].wait()
        except BaseException:
            self.settle()
            raise
        self._under_way = None

    def settle(self) -> None:
        """End what is still under way: a run that Ctrl-C has left, or a second Ctrl-C while it was stopped."""
        if self._under_way is not None:
            latch, tasks, stop = self._under_way
            stop()
            self._hand_out(tasks)  # some may not have had theirs; each runs once
            latch.wait()
            self._under_way = None

    def _hand_out(self, tasks: Iterable[Task]) -> None:
        for inbox, task in zip(self._inboxes, tasks, strict=True):
            inbox.put(task)

    def _start(self) -> None:
        threads = torch.get_num_threads()
        missing = list(zip(self._names, self._inboxes, strict=True))[len(self._threads) :]
        ready = _Latch(len(missing))
        for name, inbox in missing:
            thread = threading.Thread(target=_work, args=(inbox, ready, self._intra_op_threads), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        ready.wait()
        torch.set_num_threads(threads)  # what a thread sets for itself, later threads would inherit

    def close(self) -> None:
        self._closed = True
        if not self._holders or self.flows:
            self.settle()
        for inbox in self._inboxes:
            inbox.put(None)
        if not self.works_here:  # a layer that closes its pipeline can't wait for it
            for thread in self._threads:
                thread.join()
        self._threads = []


def make_team(devices: Sequence[int], intra_op_threads: int | None) -> Team:
    """A thread for each of these devices; by default they share the caller's intra-op threads."""
    threads = max(1, torch.get_num_threads() // len(devices)) if intra_op_threads is None else intra_op_threads
    return Team([f"gapless device {device}" for device in devices], threads)


def close_with(owner: object, close: Task) -> Callable[[], Any]:
    """Calls `close` when `owner` is closed or collected, or the interpreter ends."""
    return weakref.finalize(owner, _close, close, os.getpid())


def _close(close: Task, process: int) -> None:
    if os.getpid() == process:  # a forked child has its copy, but it is not its own
        close()


def _work(inbox: "queue.SimpleQueue[Task | None]", ready: "_Latch", intra_op_threads: int) -> None:
    try:
        set_intra_op_threads(intra_op_threads)
    finally:
        ready.down()
    while (task := inbox.get()) is not None:
        task()
        del task  # whatever it holds must not stay until the next one comes


class _Latch:
    """Opens when it was counted down to zero. Waiting for it can be interrupted."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()
        self._open = threading.Lock()
        self._open.acquire()

    def counted(self, task: Task) -> Task:
        todo = [task]

        def run() -> None:
            if todo:
                try:
                    todo.pop()()
                finally:
                    self.down()

        return run

    def down(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._open.release()

    def wait(self) -> None:
        with self._open:
            pass
