"""The threads of replicas: minibatches go in, results come out as they are done, and the first failure stops all.

A thread takes the minibatch that its replica wants, reads weights, computes without anybody's leave, and applies.
Reads, applies and what is handed out are behind one lock. The caller's thread only takes minibatches from the loader
and results from a queue; it may be interrupted anywhere.
"""

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from gapless.errors import ConfigError, note_place
from gapless.run.streams.replicas.asp import Asp
from gapless.run.streams.replicas.local_steps import LocalSteps
from gapless.run.streams.replicas.replica import Replica, casts_unkept
from gapless.run.team import Team
from gapless.run.thread_state import CallerState
from gapless.stage.batch.own_copies import own
from gapless.stage.random.exclusive import exclusively

_AHEAD = 4  # minibatches for each replica that are taken from the loader before a result is
_END = object()
_Task = tuple[int, Any, Any]  # a minibatch, its inputs and its target


@dataclass(frozen=True)
class ReplicaResult:
    """A minibatch that was applied: its loss (detached, 0-d), the replica that computed it, and how many updates its
    weights have missed.
    """

    minibatch: int
    loss: Tensor
    replica: int
    staleness: int


class ReplicaThreads:
    """One run over a loader's minibatches."""

    def __init__(self, replicas: Sequence[Replica], course: Asp | LocalSteps, intra_op_threads: int) -> None:
        self._replicas, self._course = replicas, course
        self._state = CallerState()
        # The caller takes the lock itself: Ctrl-C inside of Condition.__enter__ would leave it locked for ever.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: dict[int, tuple[Any, Any]] = {}  # minibatches by number: inputs and target
        self._ended = self._stopping = False
        self._failures: list[BaseException] = []
        self._said: queue.SimpleQueue[ReplicaResult | None] = queue.SimpleQueue()  # None: a thread has ended
        self._team = Team([f"gapless replica {replica.number}" for replica in replicas], intra_op_threads)

    def results(self, batches: Iterator[Any], first: int) -> Iterator[ReplicaResult]:
        """In the order in which they were applied. Left before its end, what is under way is given up."""
        fed = said = 0
        self._course.begin(first)
        try:
            self._team.begin([partial(self._work, replica) for replica in self._replicas], self._stop)
            while not self._ended or said < fed:
                while not self._ended and fed - said < _AHEAD * len(self._replicas) and not self._failures:
                    with exclusively():  # a loader that draws must not draw what is a replica's
                        batch = next(batches, _END)
                    self._feed(first + fed, batch)
                    fed += batch is not _END
                if said < fed and (result := self._said.get()) is not None:
                    said += 1
                    yield result
                elif self._failures:
                    raise self._failures[0]
            self._team.finish()
            self._course.finish()
        finally:
            self._team.close()
            self._failures.clear()  # a traceback holds this frame, and this frame must not hold the traceback
            self._state.leave()

    @property
    def next(self) -> int:
        """The first minibatch that nobody has begun."""
        return self._course.next

    def _feed(self, number: int, batch: Any) -> None:
        pair = (None, None) if batch is _END else pair_of(batch, number)
        inputs, target = own(*pair)
        with self._lock:
            if batch is _END:
                self._ended = True
            else:
                self._waiting[number] = inputs, target
            self._changed.notify_all()

    def _stop(self) -> None:
        self._stopping = True
        with self._lock:
            self._changed.notify_all()

    def _work(self, replica: Replica) -> None:
        place = "at its start"
        try:
            with self._state.entered(), casts_unkept():
                while (task := self._taken(replica)) is not None:
                    place = f"minibatch {task[0]}"
                    self._train(replica, task)
                    del task  # its tensors must not stay until the next one comes
        except BaseException as error:
            note_place(error, f"in replica {replica.number}, {place}; the model has had {self._course.updates} updates")
            self._failures.append(error)
            self._stop()
        finally:
            self._said.put(None)

    def _taken(self, replica: Replica) -> _Task | None:
        """The next minibatch for a replica, which has read its weights then; None if there is none."""
        with self._changed:
            while not self._stopping:
                wanted = self._course.wanted(replica.number)
                if wanted is not None and wanted in self._waiting:
                    self._course.read(replica)
                    self._changed.notify_all()
                    return (wanted, *self._waiting.pop(wanted))
                if self._ended and (wanted is not None or not self._waiting):
                    break
                self._changed.wait(1.0)
        return None

    def _train(self, replica: Replica, task: _Task) -> None:
        loss = replica.gradient(*task)
        self._course.learn(replica)
        with self._changed:
            if self._stopping:
                return
            staleness = self._course.apply(replica)
            self._said.put(ReplicaResult(task[0], loss, replica.number, staleness))  # in the order of the updates
            self._changed.notify_all()


def pair_of(batch: Any, number: int) -> tuple[Any, Any]:
    """The inputs and the target in what a loader gives."""
    if not isinstance(batch, tuple | list):
        return batch, None
    if len(batch) != 2:
        raise ConfigError(
            f"minibatch {number} is a {type(batch).__name__} of {len(batch)}, but it must be inputs and a target, "
            "where several inputs are a tuple or a dict: ((x1, x2), y)"
        )
    return batch[0], batch[1]
