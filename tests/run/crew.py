"""Ranks as a user's programs: processes of their own, whose exceptions nobody catches, and which leave as programs do.

A server imports torch once and forks a crew whenever it is told to; each rank has a file for what it prints. Rank 0
holds the store, as without torchrun's agent. Whatever the test does, no process outlives it.
"""

import contextlib
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

POLL = 0.01


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

    def __init__(self, server: "Server", folder: Path, pids: Sequence[int]) -> None:
        self._server, self.folder, self.pids = server, folder, pids
        self.took = 0.0

    def said(self, rank: int) -> str:
        return (self.folder / f"{rank}.txt").read_text()

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
            found = self._server.ask({"statuses": list(self.pids)})
            statuses = {rank: found[str(pid)] for rank, pid in enumerate(self.pids) if str(pid) in found}
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
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.run.crew"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._number = 0

    def ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    @contextlib.contextmanager
    def crew(self, function: Callable[..., Any], ranks: int, *words: object, folder: Path) -> Iterator[Crew]:
        self._number += 1
        place = folder / str(self._number)
        place.mkdir()
        for rank in range(ranks):
            (place / f"{rank}.txt").touch()
        name = f"{function.__module__}:{function.__qualname__}"
        pids = self.ask({"start": name, "ranks": ranks, "words": [str(word) for word in words], "folder": str(place)})
        try:
            yield Crew(self, place, pids)
        finally:
            self.ask({"end": pids})

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


# -- in the server -----------------------------------------------------------------------------------------------------


def serve() -> Callable[[], None] | None:
    """In the server until the test has gone; in a rank what it is to do."""
    statuses: dict[int, int] = {}
    running: set[int] = set()
    for line in sys.stdin:
        question = json.loads(line)
        answer: Any = None
        if "start" in question:
            port = _free_port()
            answer = []
            for rank in range(question["ranks"]):
                child = os.fork()
                if child == 0:
                    return lambda: _rank(rank, port, question)
                answer.append(child)
            running.update(answer)
        elif "end" in question:
            _end(running.intersection(question["end"]), running, statuses)
        _reap(running, statuses)
        if "statuses" in question:
            answer = {pid: statuses[pid] for pid in question["statuses"] if pid in statuses}
        print(json.dumps(answer), flush=True)
    _end(set(running), running, statuses)
    return None


def _reap(running: set[int], statuses: dict[int, int]) -> None:
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            statuses[pid] = os.waitstatus_to_exitcode(status)
            running.discard(pid)


def _end(pids: set[int], running: set[int], statuses: dict[int, int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    while pids & running:
        _reap(running, statuses)
        time.sleep(POLL)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _rank(rank: int, port: int, question: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    file = os.open(f"{question['folder']}/{rank}.txt", os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(question["ranks"]))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    module, _, path = question["start"].partition(":")
    getattr(importlib.import_module(module), path)(*question["words"])


if __name__ == "__main__":
    import torch

    import gapless.pipeline.pipeline
    import gapless.run.ranks.many_processes  # noqa: F401  # before the fork: once for all ranks
    import tests.run.test_watch  # noqa: F401

    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # what torch imports at the first use
    _todo = serve()
    if _todo is not None:
        _todo()
