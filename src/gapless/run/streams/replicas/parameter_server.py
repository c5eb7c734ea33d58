"""The rank that has the weights of all replicas: it answers their messages, one at a time, in the order they come in.

    replica          server
    begin      -->         all have begun, with the same weights?    -->  go, or stop
    read       -->         may it, by the bound?                     -->  the weights, and the number of a minibatch
    apply      -->         its gradient goes into the weights        -->  the staleness
    average    -->         all have made their local steps           -->  the mean
    stop       -->         it failed, was interrupted, or left       whoever asks next is told to stop
    end        -->         it has nothing more to do; when all have  -->  final: the weights, what was done, and why
    thanks     -->         it has them

Only what a replica has asked for is answered, so nobody has more than one message to read.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from gapless.errors import note_place
from gapless.run.ranks.fingerprints import differ, saved_tensors
from gapless.run.ranks.watch.blame import in_short
from gapless.run.streams.replicas.asp import Asp
from gapless.run.streams.replicas.rank_messages import RankMessage
from gapless.run.streams.replicas.replica_state import averaged, put_buffers, put_state, state_of
from gapless.stage.intra_op import intra_op_threads

_NOBODY = -1
FAILED, REFUSED, LEFT = range(3)  # how a run was stopped


class ParameterServer:
    """`course` is None for local steps. Replica number n is on the n-th of these ranks."""

    def __init__(
        self,
        model: nn.Module,
        course: Asp | None,
        ranks: Sequence[int],
        threads: int,
        send: Callable[[int, RankMessage], None],
    ) -> None:
        self._model, self._course, self._ranks, self._threads, self._send = model, course, ranks, threads, send
        self._lock = threading.Lock()
        self.updates = 0
        self.failure: Exception | None = None  # of an update, in the last run
        self._runs = 0  # that have ended
        self._reset()

    def _reset(self) -> None:
        self._asking: dict[int, RankMessage] = {}  # who waits for an answer, in the order of arrival
        self._ended: set[int] = set()
        self._first = self._next = 0  # minibatches
        self._running = False
        self._stopped_by, self._why, self._how = _NOBODY, "", FAILED

    def take(self, replica: int, message: RankMessage) -> None:
        """From any thread."""
        with self._lock, torch.enable_grad(), intra_op_threads(self._threads):
            try:
                self._take(replica, message)
                self._answer()
            except Exception as error:  # of the optimizer, say; and of the rank that has it
                applies = message.kind == "apply"
                where = "in the update with a gradient of" if applies else f"in its answer to {message.kind} from"
                note_place(error, f"{where} rank {self._ranks[replica]}")
                self.failure = error
                word = "in an update" if applies else "in an answer"
                self._stop(0, f"rank {self._ranks[0]} failed {word}: {in_short(error)}")
                if replica not in self._ended:
                    self._asking[replica] = message
                self._answer()

    def _take(self, replica: int, message: RankMessage) -> None:
        if message.kind == "stop":
            run, how = message.numbers
            if run == self._runs:  # or it came too late
                self._stop(replica, message.words, how)
        elif message.kind == "thanks":
            self._send(0, RankMessage("thanks", (replica,)))
        elif message.kind == "end":
            self._asking.pop(replica, None)
            self._ended.add(replica)
            self._count(replica, message.numbers[0])
        elif message.kind == "apply" and not self._why:
            assert self._course is not None
            staleness = self._course.step(replica, message.tensors["grads"])
            with torch.no_grad():
                put_buffers(self._model, message.tensors["buffers"])
            self._send(replica, RankMessage("applied", (staleness,)))
        else:
            self._asking[replica] = message

    def _count(self, replica: int, steps: int) -> None:
        """It has made so many steps, and will make no more."""
        if self._course is not None:
            self._course.leave(replica)
            self.updates, self._next = self._course.updates, self._course.next
        elif steps:
            self.updates += steps
            self._next = max(self._next, self._first + (steps - 1) * len(self._ranks) + replica + 1)

    def _stop(self, replica: int, why: str, how: int = FAILED) -> None:
        if not self._why:
            self._stopped_by, self._why, self._how = replica, why, how

    def _answer(self) -> None:
        """Whoever can be."""
        there = len(self._asking) + len(self._ended) == len(self._ranks)
        if not self._running and there and not self._why:
            self._begin()
        if self._why:
            for replica in self._asking:
                self._send(replica, RankMessage("stop"))
            self._asking.clear()
        elif self._running and self._course is not None:
            self._let_read(self._course)
        elif self._running and there and self._asking:
            self._average()
        if len(self._ended) == len(self._ranks):
            self._finish()

    def _begin(self) -> None:
        """All replicas are there: compared with the first of them they are to train the same model."""
        first = min(self._asking, default=0)
        for replica, message in sorted(self._asking.items()):
            if fault := "".join(_faults(self._model, self._asking[first], message))[:300]:
                ranks = f"rank {self._ranks[first]} and rank {self._ranks[replica]}"
                self._stop(replica, f"{ranks} differ: {fault}", REFUSED)
                return
        if self._asking:
            self._first = self._next = self._asking[first].numbers[0]
        if self._course is not None:
            self._course.begin(self._first)
        self._running, self.failure = True, None
        for replica in self._asking:
            self._send(replica, RankMessage("go", tensors=state_of(self._model, trained_only=False)))
        self._asking.clear()

    def _let_read(self, course: Asp) -> None:
        for replica in list(self._asking):
            minibatch = course.wanted(replica)
            if minibatch is not None:
                course.note_read(replica)
                del self._asking[replica]
                self._send(replica, RankMessage("weights", (minibatch,), tensors=state_of(self._model)))

    def _average(self) -> None:
        mean = averaged([message.tensors for _, message in sorted(self._asking.items())])
        put_state(self._model, mean)
        for replica in self._asking:
            self._send(replica, RankMessage("mean", tensors=mean))
        self._asking.clear()

    def _finish(self) -> None:
        """The last one has ended; who begins next begins another run."""
        order = "" if self._course is None else str(self._course.order)
        numbers = (self.updates, self._next, self._stopped_by, self._how)
        words, state = json.dumps([order, self._why]), state_of(self._model, trained_only=False)
        self._reset()
        self._runs += 1
        for replica in range(len(self._ranks)):
            self._send(replica, RankMessage("final", numbers, words, state))


def _faults(model: nn.Module, one: RankMessage, other: RankMessage) -> Iterator[str]:
    if one.numbers != other.numbers:
        yield f"the next minibatch is {one.numbers[0]} on one and {other.numbers[0]} on the other; "
    if one.words != other.words:
        yield "other parameters are frozen, or other modules are in eval mode; make the same calls on all ranks"
        return
    if len(one.tensors) != len(other.tensors):
        yield f"one has {len(one.tensors)} parameters and buffers, the other {len(other.tensors)}; make the same model"
        return
    unequal = differ(one.tensors, other.tensors)
    names = [name for name, is_other in zip(dict(saved_tensors(model)), unequal.tolist(), strict=True) if is_other]
    if names:
        yield (
            f"{', '.join(names[:3])}{' and more' if names[3:] else ''} have other values; make the model with the same "
            "torch.manual_seed on every rank, or load the same file"
        )
