"""The other end of `ranks`: start them, ask them for steps, and leave no process behind, whatever happens."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, Literal

from gapless.bench.peer.contest import Contest
from gapless.errors import TransportError
from gapless.schedule.action import Schedule
from gapless.schedule.recipes import make_schedule

_SIDES = {"torch": ("torch.distributed.pipelining", "; try --no-peer"), "gapless": ("gapless on ranks", "")}


class Peer:
    """A contestant in processes of its own, one per device, for as long as the context lasts.

    schedules   those that it runs, by name, as it runs them
    refused     why it does not run the others
    """

    def __init__(self, contest: Contest, names: Sequence[str], side: Literal["torch", "gapless"] = "torch") -> None:
        self._contest = contest
        self._names = list(names)
        self._side = side
        self._who, self._way_out = _SIDES[side]
        self.schedules: dict[str, Schedule] = {}
        self.refused: dict[str, str] = {}

    def __enter__(self) -> "Peer":
        self._errors = tempfile.TemporaryFile()
        self._said = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gapless.bench.peer.ranks", self._side, self._contest.to_json(self._names)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C is ours to handle, and the whole group can be ended at once
        )
        try:
            ready = self._hear(within=180.0)
        except BaseException:
            self._end()
            raise
        self.refused = ready["refused"]
        for name, order in ready["orders"].items():
            made = make_schedule(name, devices=self._contest.devices, microbatches=self._contest.microbatches)
            self.schedules[name] = made if order is None else Schedule.parse(order, name=name)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def step(self, name: str, times: int = 1) -> float:
        """The mean seconds of one of several steps in a row."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has gone, and `_hear` says why
            self._process.stdin.write(json.dumps([name, times]).encode() + b"\n")
            self._process.stdin.flush()
        seconds: float = self._hear(within=60.0 + 100 * times)["seconds"]
        return seconds / times

    def _hear(self, within: float) -> Any:
        assert self._process.stdout is not None
        out, deadline = self._process.stdout.fileno(), time.monotonic() + within
        while b"\n" not in self._said:
            if not select.select([out], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TransportError(f"{self._who} did not answer within {within:.0f} s{self._way_out}")
            part = os.read(out, 65536)
            if not part:
                raise TransportError(f"{self._who} has ended: {self._last_words()}{self._way_out}")
            self._said += part
        line, _, self._said = self._said.partition(b"\n")
        answer = json.loads(line)
        if "failed" in answer:
            reason = (answer["failed"].strip().splitlines() or [""])[0]
            raise TransportError(f"{self._who} failed: {reason}{self._way_out}")
        return answer

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "it did not say why"

    def _end(self) -> None:
        """All of its processes are in one group, which nothing else is in; its leader is not reaped before."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for end in (self._process.stdin, self._process.stdout):
            if end is not None:
                with contextlib.suppress(BrokenPipeError):
                    end.close()
        self._process.wait()
        self._errors.close()
