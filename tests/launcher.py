"""A process that has imported what ranks need, and forks them whenever it is asked to.

    test --- requests ---> launcher --- forks ---> rank 0, rank 1, ...
         <--- answers ----

To import torch takes seconds, to fork takes milliseconds. No rank outlives whoever asked for it: the launcher ends with
its standard input, and ranks end with the launcher.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import die_with_parent
from gapless.errors import TransportError

_POLL = 0.005


class Launcher:
    """Starts ranks, says how they have ended, and ends them; the other end of `main` below.

    modules       what the launcher imports before its first fork
    environment   what its ranks find in theirs, beside what is here
    """

    def __init__(self, *modules: str, environment: Mapping[str, str] | None = None) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `close`
        self._asked = 0
        # A test may be in another folder.
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.launcher", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            start_new_session=True,  # Ctrl-C is for whoever started it
        )

    def start(
        self, function: Callable[..., object], ranks: int, *words: str, said: Sequence[Path], imports: str = ""
    ) -> list[int]:
        """Fork ranks that call `function(rank, ranks, *words)` and then leave as programs do; their process ids.

        said      the file of each rank for what it prints; may be the same for all
        imports   a module that the launcher imports before, so that ranks need not
        """
        name = f"{function.__module__}:{function.__qualname__}"
        files = [str(file) for file in said]
        pids: list[int] = self._ask(start=name, ranks=ranks, words=words, said=files, imports=imports)
        return pids

    def statuses(self, pids: Iterable[int]) -> dict[int, int]:
        """The exit statuses of those that have ended."""
        found = self._ask(statuses=list(pids))
        return {int(pid): status for pid, status in found.items()}

    def end(self, pids: Iterable[int]) -> None:
        """Kill those that are still there, and wait until they have gone."""
        self._ask(end=list(pids))

    def close(self) -> None:
        """End the launcher with all its ranks, which nothing else shares a process group with."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for end in (self._process.stdin, self._process.stdout):
            if end is not None:
                with contextlib.suppress(BrokenPipeError):
                    end.close()
        self._process.wait()
        self._errors.close()

    def _ask(self, **question: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._asked += 1
        with contextlib.suppress(BrokenPipeError):  # it has gone, and there is no answer either
            self._process.stdin.write(json.dumps({"number": self._asked, **question}) + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            answer = json.loads(line)
            if answer["number"] == self._asked:  # whoever asked before was interrupted
                if "failed" in answer:
                    raise TransportError(f"the process that starts ranks failed: {answer['failed']}")
                return answer["answer"]
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        raise TransportError(f"the process that starts ranks has ended: {lines[-1] if lines else 'it did not say why'}")


# -- in the launcher ---------------------------------------------------------------------------------------------------


def _serve() -> Callable[[], object] | None:
    """In the launcher until nobody asks any more; in a rank what it is to do."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not get between the answers
    statuses: dict[int, int] = {}
    running: set[int] = set()
    for line in sys.stdin:
        question = json.loads(line)
        answer: Any = None
        if "start" in question:
            try:
                function = _found(question)
            except Exception as error:
                reply = {"number": question["number"], "failed": f"{type(error).__name__}: {error}"}
                print(json.dumps(reply), file=answers, flush=True)
                continue
            gc.freeze()  # what is here stays: ranks need not look through it, nor copy it by doing so
            answer = []
            for rank, file in enumerate(question["said"]):
                child = os.fork()
                if child == 0:
                    answers.close()
                    die_with_parent()
                    _print_into(file)
                    return lambda: function(rank, question["ranks"], *question["words"])
                answer.append(child)
            running.update(answer)
        elif "end" in question:
            _end(running.intersection(question["end"]), running, statuses)
        else:
            _reap(running, statuses)
            answer = {pid: statuses[pid] for pid in question["statuses"] if pid in statuses}
        print(json.dumps({"number": question["number"], "answer": answer}), file=answers, flush=True)
    _end(set(running), running, statuses)
    return None


def _found(question: dict[str, Any]) -> Callable[..., object]:
    if question["imports"]:
        import_module(question["imports"])
    module, _, path = question["start"].partition(":")
    function: Callable[..., object] = getattr(import_module(module), path)
    return function


def _print_into(file: str) -> None:
    """Standard output and error go there, and there is nothing to read."""
    out, nothing = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT), os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    os.close(out)
    os.close(nothing)


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
        time.sleep(_POLL)


def main() -> None:
    """Import what is named on the command line, then serve; a rank returns from here and does its work."""
    die_with_parent()
    # Whether there is a GPU is asked without its driver: what has asked the driver has no GPU after a fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for name in sys.argv[1:]:
        import_module(name)
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    work = _serve()
    if work is not None:
        work()


if __name__ == "__main__":
    main()
