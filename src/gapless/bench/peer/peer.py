"""The other end of `ranks`: start them, ask them for steps, and leave no process behind, whatever happens."""

import contextlib
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from gapless.bench.peer.contest import Contest
from gapless.bench.peer.launcher import Launcher
from gapless.bench.peer.ranks import compete
from gapless.errors import TransportError
from gapless.schedule.action import Schedule
from gapless.schedule.recipes import RECIPES, make_schedule

_SIDES = {
    "torch": ("torch.distributed.pipelining", "; try --no-peer"),
    "torchgpipe": ("torchgpipe", "; try --no-peer"),
    "fsdp": ("FSDP2", "; try --no-peer"),
    "gapless": ("gapless on ranks", ""),
    "parts": ("the parts of the model", ""),
    "replicas": ("stages with replicas on ranks", ""),
}


SideName = Literal["torch", "torchgpipe", "fsdp", "gapless", "parts", "replicas"]
_ONE_PROCESS = ("torchgpipe",)  # whose devices are threads


def modules(*sides: SideName) -> list[str]:
    """What a launcher imports for them."""
    return ["gapless.bench.peer.ranks", *(f"gapless.bench.peer.{side}_side" for side in sides)]


class Peer:
    """A contestant in processes of its own, one per device, for as long as the context lasts.

    schedules   those that it runs, by name, as it runs them
    refused     why it does not run the others
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
        self._who, self._way_out = _SIDES[side]
        self._stack = contextlib.ExitStack()
        self._ranks: list[Connection] = []
        self.schedules: dict[str, Schedule] = {}
        self.refused: dict[str, str] = {}
        self.bubbles: dict[str, float] = {}

    def __enter__(self) -> "Peer":
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            launcher = self._launcher
            if launcher is None:
                launcher = Launcher(*modules(self._side), environment=self._environment)
                stack.callback(launcher.close)
            count = 1 if self._side in _ONE_PROCESS else self._contest.devices
            door = stack.enter_context(socket.socket(socket.AF_UNIX))
            door.bind(str(folder / "door"))
            door.listen(count)
            words = (str(folder), self._side, self._contest.to_json(self._names))
            pids = launcher.start(compete, count, *words, said=[folder / "said"] * count)
            if self._launcher is not None:
                stack.callback(launcher.end, pids)
            arrived = [stack.enter_context(self._let_in(door)) for _ in range(count)]
            self._ranks = sorted(arrived, key=lambda rank: int(rank.recv()))  # each begins with its number
            orders, self.refused = self._gather(within=180.0)[0]
            self._stack = stack.pop_all()
        for name, order in orders.items():
            if order is not None:
                self.schedules[name] = Schedule.parse(order, name=name)
            elif name in RECIPES:
                devices, microbatches = self._contest.devices, self._contest.microbatches
                self.schedules[name] = make_schedule(name, devices=devices, microbatches=microbatches)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def step(self, name: str, times: int = 1) -> float:
        """The mean seconds of one of several steps in a row, each from the first start of a rank to the last end. They
        are called in their order, the first one first, and come to a step one after another as they do in training.
        """
        with contextlib.suppress(ConnectionError):  # it has gone, and `_gather` says why
            for rank in self._ranks:
                rank.send((name, times))
        spans = self._gather(within=60.0 + 100 * times)
        if (bubble := spans[0][2]) is not None:
            self.bubbles[name] = bubble
        return float(max(end for _, end, _ in spans) - min(start for start, _, _ in spans)) / times

    def _let_in(self, door: socket.socket) -> Connection:
        door.settimeout(60.0)
        try:
            return Connection(door.accept()[0].detach())
        except TimeoutError:
            raise TransportError(f"{self._who} did not start within 60 s{self._way_out}") from None

    def _gather(self, within: float) -> list[Any]:
        """One answer of every rank."""
        answers: dict[Connection, Any] = {}
        deadline = time.monotonic() + within
        while len(answers) < len(self._ranks):
            ready = wait([rank for rank in self._ranks if rank not in answers], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TransportError(f"{self._who} did not answer within {within:.0f} s{self._way_out}")
            for rank in ready:
                assert isinstance(rank, Connection)
                try:
                    answers[rank] = rank.recv()
                except (EOFError, ConnectionError):
                    answers[rank] = "a rank ended without a word"
                if isinstance(answers[rank], str):
                    reason = (answers[rank].strip().splitlines() or [""])[0]
                    raise TransportError(f"{self._who} failed: {reason}{self._way_out}")
        return [answers[rank] for rank in self._ranks]
