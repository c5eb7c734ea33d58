"""The other end of `ranks`: start them, ask them for steps, and leave no process behind, whatever happens."""

import contextlib
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from benchmarks.peer.contest import Contest
from benchmarks.peer.launcher import Launcher
from benchmarks.peer.ranks import Failed, Prepared, Stepped, compete
from benchmarks.runner.rounds import GaveUpError
from gapless.errors import TransportError
from gapless.schedule.action import Schedule
from gapless.schedule.recipes import RECIPES, make_schedule

_SIDES = {
    "torch": "torch.distributed.pipelining",
    "torchgpipe": "torchgpipe",
    "fsdp": "FSDP2",
    "gapless": "gapless on ranks",
    "parts": "the parts of the model",
    "replicas": "stages with replicas on ranks",
}
_OTHERS = ("torch", "torchgpipe", "fsdp")  # what fails of them is left out; what fails of ours is an error


SideName = Literal["torch", "torchgpipe", "fsdp", "gapless", "parts", "replicas"]
_ONE_PROCESS = ("torchgpipe",)  # whose devices are threads
_PATIENCE = 3.0  # seconds, for the other ranks to say how they failed


def modules(*sides: SideName) -> list[str]:
    """What a launcher imports for them."""
    return ["benchmarks.peer.ranks", *(f"benchmarks.peer.{side}_side" for side in sides)]


class _RankFailedError(Exception):
    """The first cause of it, and the schedule it was met with: empty before the first one."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name


class Peer:
    """A contestant in processes of its own, one per device, for as long as the context lasts.

    schedules   those that it runs, by name, as it runs them
    refused     why it does not run the others: it does not take the sizes, or failed. After a failure its ranks start
                again without that schedule. A schedule of ours is never left out: there it is an error
    launcher    to start the ranks with, where there is one already
    bubbles     of those whose last step had a timeline, with the times of its actions
    """

    def __init__(
        self,
        contest: Contest,
        names: Sequence[str],
        side: SideName = "torch",
        environment: Mapping[str, str] | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        self._contest = contest
        self._environment, self._launcher = environment, launcher
        self._names = list(names)
        self._side = side
        self._stack = contextlib.ExitStack()
        self._ranks: list[Connection] = []
        self.schedules: dict[str, Schedule] = {}
        self.refused: dict[str, str] = {}
        self.bubbles: dict[str, float] = {}

    def __enter__(self) -> "Peer":
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def step(self, name: str, times: int = 1) -> float:
        """The mean seconds of one of several steps in a row, each from the first start of a rank to the last end. They
        are called in their order, the first one first, and come to a step one after another as they do in training.
        Raises `GaveUpError` for a schedule that is left out from now on.
        """
        if name in self.refused:
            raise GaveUpError(f"{_SIDES[self._side]} can't run {name}: {self.refused[name]}")
        with contextlib.suppress(ConnectionError):  # it has gone, and `_gather` says why
            for rank in self._ranks:
                rank.send((name, times))
        try:
            spans: list[Stepped] = self._gather(name, within=60.0 + 100 * times)
        except _RankFailedError as failure:
            self._leave_out(failure)
            self._stack.close()
            self._start()
            return self.step(name, times)
        if (bubble := spans[0].bubble) is not None:
            self.bubbles[name] = bubble
        return (max(span.end for span in spans) - min(span.start for span in spans)) / times

    def _start(self) -> None:
        """The ranks, again without what fails until nothing does."""
        orders = None
        while orders is None:
            names = [name for name in self._names if name not in self.refused]
            if not names:
                orders = dict[str, str | None]()
                break
            with contextlib.ExitStack() as stack:
                try:
                    self._ranks = self._let_in(stack, names)
                    orders = self._prepare(names)
                    self._stack = stack.pop_all()
                except _RankFailedError as failure:
                    self._leave_out(failure)
        for name, order in orders.items():
            if order is not None:
                self.schedules[name] = Schedule.parse(order, name=name)
            elif name in RECIPES:
                devices, microbatches = self._contest.devices, self._contest.microbatches
                self.schedules[name] = make_schedule(name, devices=devices, microbatches=microbatches)

    def _leave_out(self, failure: _RankFailedError) -> None:
        """The schedule that failed, or all where it is none of them."""
        if self._side not in _OTHERS:
            at = f" with {failure.name}" if failure.name else ""
            raise TransportError(f"{_SIDES[self._side]} failed{at}: {failure}") from None
        for name in [failure.name] if failure.name else self._names:
            self.refused.setdefault(name, f"it failed: {failure}")
            self.schedules.pop(name, None)

    def _let_in(self, stack: contextlib.ExitStack, names: Sequence[str]) -> list[Connection]:
        """Start the ranks, and wait for them."""
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        launcher = self._launcher
        if launcher is None:
            launcher = Launcher(*modules(self._side), environment=self._environment)
            stack.callback(launcher.close)
        count = 1 if self._side in _ONE_PROCESS else self._contest.devices
        door = stack.enter_context(socket.socket(socket.AF_UNIX))
        door.bind(str(folder / "door"))
        door.listen(count)
        door.settimeout(60.0)
        words = (str(folder), self._side, self._contest.to_json(names))
        pids = launcher.start(compete, count, *words, said=[folder / "said"] * count)
        if self._launcher is not None:
            stack.callback(launcher.end, pids)
        try:
            arrived = [stack.enter_context(Connection(door.accept()[0].detach())) for _ in range(count)]
            return sorted(arrived, key=lambda rank: int(rank.recv()))  # each begins with its number
        except TimeoutError:
            raise _RankFailedError("", "its ranks did not start within 60 s") from None
        except (EOFError, ConnectionError):
            raise _RankFailedError("", "a rank ended as soon as it had started") from None

    def _prepare(self, names: Sequence[str]) -> dict[str, str | None]:
        """The order of the actions of each schedule that is not refused."""
        orders: dict[str, str | None] = {}
        for name in names:
            answers: list[Prepared] = self._gather(name, within=180.0)
            if why := next((answer.refused for answer in answers if answer.refused), ""):
                self.refused[name] = why
            else:
                orders[name] = answers[0].order
        return orders

    def _gather(self, name: str, within: float) -> list[Any]:
        """One answer of every rank."""
        answers: dict[Connection, Any] = {}
        deadline = time.monotonic() + within
        while len(answers) < len(self._ranks):
            ready = wait([rank for rank in self._ranks if rank not in answers], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise _RankFailedError(name, f"it did not answer within {within:.0f} s")
            answers |= {rank: _heard(rank) for rank in ready if isinstance(rank, Connection)}
            if any(isinstance(answer, Failed | None) for answer in answers.values()):
                raise self._first_cause(name, answers)
        return [answers[rank] for rank in self._ranks]

    def _first_cause(self, name: str, answers: Mapping[Connection, Any]) -> _RankFailedError:
        """The earliest failure of all ranks. One that ended without a word was killed: the others only noticed."""
        ends = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failed | None)}
        deadline = time.monotonic() + _PATIENCE
        while len(ends) < len(self._ranks):
            ready = wait([rank for rank in self._ranks if rank not in ends], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            heard = {rank: _heard(rank) for rank in ready if isinstance(rank, Connection)}
            ends |= {rank: answer for rank, answer in heard.items() if isinstance(answer, Failed | None)}
        if silent := [number for number, rank in enumerate(self._ranks) if rank in ends and ends[rank] is None]:
            return _RankFailedError(name, f"rank {silent[0]} ended without a word")
        first = min(answer for answer in ends.values() if answer is not None)
        return _RankFailedError(first.name, (first.reason.strip().splitlines() or [""])[0])


def _heard(rank: Connection) -> Prepared | Stepped | Failed | None:
    """None if it has ended without a word."""
    try:
        return rank.recv()  # type: ignore[no-any-return]
    except (EOFError, ConnectionError):
        return None
