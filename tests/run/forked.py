"""A function of this test suite on several ranks, which have a Gloo group over loopback and one intra-op thread."""

import importlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.peer.ranks import join_group
from tests.launcher import Launcher

_POLL = 0.02
_PATIENCE = 20.0  # for ranks that wait for one that has failed


class Launch:
    """Call it with a function and a number of ranks; the fixture `launch`."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def __call__(
        self, function: Callable[..., Any], ranks: int, *words: str, timeout: float = 90.0, fails: bool = False
    ) -> str:
        """Every rank calls the function with these words; what they have printed. Fails if one of them does, or none
        where that is expected.
        """
        name, module = f"{function.__module__}:{function.__qualname__}", function.__module__
        with tempfile.TemporaryDirectory() as folder:
            said = Path(folder, "said.txt")
            pids = self._launcher.start(_rank, ranks, folder, name, *words, said=[said] * ranks, imports=module)
            try:
                statuses, late = self._ended(pids, timeout)
            finally:
                self._launcher.end(pids)
            text = said.read_text()
        assert not late, f"{name}: {late}:\n{text}"
        assert any(statuses.values()) == fails, text
        return text

    def _ended(self, pids: list[int], timeout: float) -> tuple[dict[int, int], str]:
        """How they have ended, and if some have not, what they should have done."""
        deadline, patience = time.monotonic() + timeout, _PATIENCE
        while True:
            statuses = self._launcher.statuses(pids)
            if len(statuses) == len(pids):
                return statuses, ""
            missing = f"{len(pids) - len(statuses)} of {len(pids)} ranks did not end"
            if any(statuses.values()):
                patience -= _POLL
                if patience < 0:
                    return statuses, f"{missing} when another had failed"
            if time.monotonic() > deadline:
                return statuses, f"{missing} within {timeout} s"
            time.sleep(_POLL)


def _rank(rank: int, ranks: int, folder: str, name: str, *words: str) -> None:
    status = 1
    try:
        join_group(rank, ranks, folder, 60.0)
        module, _, path = name.partition(":")
        getattr(importlib.import_module(module), path)(*words)
        dist.barrier()
        dist.destroy_process_group()
        status = 0
    except BaseException:
        print(f"rank {rank}:\n{traceback.format_exc()}", flush=True)
    sys.stdout.flush()
    os._exit(status)  # never what a program does when it leaves
