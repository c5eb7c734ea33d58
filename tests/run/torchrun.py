"""torchrun on two hosts, as a user starts it there: its agents, and the ranks that they have started."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.run.hosts import ADDRESSES, Hosts

_POLL = 0.02
# All processes of a namespace end with its first one, so that is not the agent, and stays when the agent is killed.
_SHELL = '"$@"; code=$?; [ $code = 137 ] && sleep 600; exit $code'


class Torchrun:
    """A job of so many ranks on each host, which meet on the first."""

    def __init__(self, hosts: Hosts, folder: Path, ranks: int, command: Sequence[str]) -> None:
        self.hosts, self.folder, self.ranks, self.command = hosts, folder, ranks, command
        self.agents = [self.start(host) for host in (0, 1)]

    def start(self, host: int) -> "subprocess.Popen[str]":
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(self.ranks)]
        words += ["--max-restarts", "9", "--rdzv-backend", "c10d", "--local-addr", ADDRESSES[host]]
        words += ["--rdzv-endpoint", f"{ADDRESSES[0]}:29500"]
        words += ["--rdzv-conf", f"is_host={int(host == 0)}", *self.command]
        with open(self._said_by(host), "a") as out:
            return self.hosts.start(host, ["sh", "-c", _SHELL, "sh", *words], out.fileno(), self.folder)

    def kill_agent(self, host: int) -> None:
        """Its ranks live on."""
        (agent,) = (each for each in self.hosts.processes(host) if _words(each)[2:3] == ["torch.distributed.run"])
        os.kill(agent, signal.SIGKILL)

    def ranks_of(self, host: int) -> list[int]:
        """The processes that the agent of this host has started, in their order."""
        end = self.command[-1]
        found = [
            each for each in self.hosts.processes(host) if end in (words := _words(each)) and "--nnodes" not in words
        ]
        return sorted(found)

    def wait_for(self, done: Callable[[], bool], seconds: float = 200.0) -> None:
        until = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < until, self.said()
            assert all(agent.poll() in (None, 0) for agent in self.agents), self.said()
            time.sleep(_POLL)

    def end(self) -> None:
        """Waits until all steps are done."""
        self.wait_for(lambda: all(agent.poll() == 0 for agent in self.agents))

    def said(self) -> str:
        return "".join(self._said_by(host).read_text() for host in (0, 1))

    def _said_by(self, host: int) -> Path:
        return self.folder / f"host {host}.txt"


def _words(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode("utf-8", "replace").rstrip("\0").split("\0")
    except OSError:
        return []
