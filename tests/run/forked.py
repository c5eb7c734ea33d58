"""Many ranks from one import of torch: this program is started with a function and a number, and forks that many.

    python -m tests.run.forked tests.run.test_distributed:exact_settings 4 1f1b

Every rank has one intra-op thread and a Gloo group over loopback, calls the function with what else was given, and
leaves. Says what went wrong, on every rank, and ends with a status that is not zero then.
"""

import contextlib
import ctypes
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import gapless.pipeline.pipeline
import gapless.run.ranks.many_processes  # noqa: F401  # before the fork: once for all ranks

_DIE_WITH_PARENT = 1


def launch(function: Callable[..., Any], ranks: int, *words: str, timeout: float = 90.0, fails: bool = False) -> str:
    """Run a function of this test suite on so many ranks; what they have printed."""
    name = f"{function.__module__}:{function.__qualname__}"
    command = [sys.executable, "-m", "tests.run.forked", name, str(ranks), *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        raise AssertionError(f"{name} on {ranks} ranks did not end within {timeout} s:\n{said}") from None
    assert (process.returncode != 0) == fails, said
    return said


def _rank(rank: int, ranks: int, function: Callable[..., Any], words: Sequence[str], folder: str) -> int:
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
        )
        function(*words)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        print(f"rank {rank}:\n{traceback.format_exc()}", flush=True)
        return 1
    return 0


def main() -> int:
    name, ranks, *words = sys.argv[1:]
    module, _, path = name.partition(":")
    function = getattr(importlib.import_module(module), path)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    children = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(int(ranks)):
            child = os.fork()
            if child == 0:
                status = 1
                ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
                try:
                    status = _rank(rank, int(ranks), function, words, folder)
                    sys.stdout.flush()
                finally:
                    os._exit(status)  # never what the parent does next
            children.append(child)
        worst = 0
        left = set(children)
        deadline = None
        while left:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child:
                left.discard(child)
                worst = worst or os.waitstatus_to_exitcode(status)
                if worst and deadline is None:
                    deadline = time.monotonic() + 10
            elif deadline is not None and time.monotonic() > deadline:
                print(f"{len(left)} ranks did not end when another had failed", flush=True)
                for one in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(one, signal.SIGKILL)
                deadline = float("inf")
            else:
                time.sleep(0.01)
    return 1 if worst else 0


if __name__ == "__main__":
    sys.exit(main())
