"""Ranks as a user's programs: processes of their own, whose exceptions nobody catches, and which leave as programs do.

Each rank has a file for what it prints. Rank 0 holds the store, as without torchrun's agent. Whatever the test does, no
process outlives it.
"""

import contextlib
import importlib
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.launcher import Launcher

POLL = 0.01
# What triton says in some versions when a program ends that has imported it.
_LEAKED = re.compile(r"nanobind: leaked .*?refleaks\.html", re.DOTALL)


class Awake:
    """Seconds in which this process ran. The whole machine may be stopped for a while, ranks and test alike."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last = time.monotonic()

    def tick(self) -> float:
        now = time.monotonic()
        self.seconds += min(now - self._last, 0.5)
        self._last = now
        return self.seconds


class Crew:
    """The ranks of one run, as seen from the test."""

    def __init__(self, launcher: Launcher, folder: Path, pids: Sequence[int]) -> None:
        self._launcher, self.folder, self.pids = launcher, folder, pids
        self.took = 0.0

    def said(self, rank: int) -> str:
        return re.sub(_LEAKED, "", (self.folder / f"{rank}.txt").read_text())

    def everything(self) -> str:
        return "\n".join(f"--- rank {rank}\n{self.said(rank)}" for rank in range(len(self.pids)))

    def wait_for(self, words: str, ranks: Sequence[int] | None = None, seconds: float = 60.0) -> None:
        """Until these ranks, or all, have said so."""
        awake = Awake()
        for rank in range(len(self.pids)) if ranks is None else ranks:
            while words not in self.said(rank):
                assert awake.tick() < seconds, f"rank {rank} never said {words!r}\n{self.everything()}"
                time.sleep(POLL)

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.pids[rank], number)

    def ended(
        self, ranks: Sequence[int] | None = None, seconds: float = 60.0, stopped: int | None = None
    ) -> dict[int, int]:
        """How these ranks, or all, have ended: their statuses; `took` has the seconds. `stopped` is kept so."""
        wanted = list(range(len(self.pids)) if ranks is None else ranks)
        awake = Awake()
        while True:
            if stopped is not None:
                self.signal(stopped, signal.SIGSTOP)
            found = self._launcher.statuses(self.pids)
            statuses = {rank: found[pid] for rank, pid in enumerate(self.pids) if pid in found}
            self.took = awake.tick()
            if all(rank in statuses for rank in wanted):
                return {rank: statuses[rank] for rank in wanted}
            assert self.took < seconds, f"only {sorted(statuses)} of {wanted} ended\n{self.everything()}"
            time.sleep(POLL)

    def left_behind(self) -> list[str]:
        """Processes and shared memory of ranks that have ended."""
        shared = Path("/dev/shm")
        files = [str(file) for file in shared.iterdir()] if shared.exists() else []
        return [str(pid) for pid in self.pids if Path(f"/proc/{pid}").exists()] + [
            file for file in files if any(re.search(rf"(?<!\d){pid}(?!\d)", file) for pid in self.pids)
        ]


class Server:
    """Makes crews; the fixture `server`."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._number = 0

    @contextlib.contextmanager
    def crew(self, function: Callable[..., Any], ranks: int, *words: object, folder: Path) -> Iterator[Crew]:
        self._number += 1
        place = folder / str(self._number)
        place.mkdir()
        files = [place / f"{rank}.txt" for rank in range(ranks)]
        for file in files:
            file.touch()
        called = (free_port(), function.__module__, function.__qualname__, *words)
        pids = self._launcher.start(_rank, ranks, *map(str, called), said=files, imports=function.__module__)
        try:
            yield Crew(self._launcher, place, pids)
        finally:
            self._launcher.end(pids)


def leave() -> None:
    """End this rank here and now, well: for a test that is not about leaving. To take torch apart, as a program does,
    takes a rank longer than most of what it does before.
    """
    sys.stdout.flush()
    os._exit(0)


def free_port() -> str:
    """One that nobody listens on. Higher ones may be taken a moment later: systems hand them out."""
    while True:
        port = secrets.choice(range(20_000, 30_000))
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return str(port)


def _rank(rank: int, ranks: int, port: str, module: str, function: str, *words: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    getattr(importlib.import_module(module), function)(*words)
