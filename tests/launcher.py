"""A process that has imported what ranks need, and forks them whenever it is asked to.

    tests --- requests ---> launcher --- forks ---> rank 0, rank 1, ...
          <--- answers ----

To import torch takes seconds, to fork takes milliseconds. There is one launcher for all processes that run tests, and
it imports nothing before somebody asks. No rank outlives whoever asked for it, nor the launcher, which ends with its
standard input.
"""

import contextlib
import functools
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import die_with_parent
from gapless.errors import TransportError

_POLL = 0.005
_MODULES = ("tests.run.crew", "tests.run.forked", "tests.run.preloaded", "tests.programs")
_HAS_GPU = Path("/dev/nvidiactl").exists()  # to trace asks for it, which spoils a fork: ranks trace themselves
_SOCKET, _ERRORS = "socket", "errors.txt"


@contextlib.contextmanager
def launching() -> Iterator[Path]:
    """A launcher while it holds; its folder, for `Launcher`."""
    # A test may be in another folder.
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
    with tempfile.TemporaryDirectory() as folder, Path(folder, _ERRORS).open("wb") as errors:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(Path(folder, _SOCKET)))
        listening.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.launcher", str(listening.fileno())],
            stdin=subprocess.PIPE,
            stdout=errors,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": path},
            pass_fds=[listening.fileno()],
            start_new_session=True,  # Ctrl-C is for whoever started it
        )
        listening.close()
        try:
            yield Path(folder)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # with all its ranks, which nothing else shares a group with
            process.communicate()


class Launcher:
    """Starts ranks, says how they have ended, and ends them; the other end of `main` below."""

    def __init__(self, folder: Path) -> None:
        self._errors = folder / _ERRORS
        self._asked = 0
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(folder / _SOCKET))
        self._answers = self._socket.makefile()

    def start(
        self, function: Callable[..., object], ranks: int, *words: str, said: Sequence[Path], imports: str = ""
    ) -> list[int]:
        """Fork ranks that call `function(rank, ranks, *words)` and then leave as programs do; their process ids.

        said      the file of each rank for what it prints; may be the same for all
        imports   a module that the launcher imports before, so that ranks need not; its `before_ranks` is called
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
        """End what was started here and is still there."""
        self._answers.close()
        self._socket.close()

    def _ask(self, **question: Any) -> Any:
        self._asked += 1
        with contextlib.suppress(BrokenPipeError):  # it has gone, and there is no answer either
            self._socket.sendall(json.dumps({"number": self._asked, **question}).encode() + b"\n")
        with contextlib.suppress(ConnectionResetError):
            for line in self._answers:
                answer = json.loads(line)
                if answer["number"] == self._asked:  # whoever asked before was interrupted
                    if "failed" in answer:
                        raise TransportError(f"the process that starts ranks failed: {answer['failed']}")
                    return answer["answer"]
        lines = self._errors.read_text("utf-8", "replace").strip().splitlines()
        raise TransportError(f"the process that starts ranks has ended: {lines[-1] if lines else 'it did not say why'}")


# -- in the launcher ---------------------------------------------------------------------------------------------------


def _serve(listening: socket.socket) -> Callable[[], object] | None:
    """In the launcher until its standard input ends; in a rank what it is to do."""
    statuses: dict[int, int] = {}
    asking: dict[socket.socket, set[int]] = {}  # who asks, and which ranks of theirs are still there
    unread: dict[socket.socket, bytes] = {}
    with selectors.DefaultSelector() as ready:
        for source in (sys.stdin, listening):
            ready.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is sys.stdin:
                    return None  # ranks end with their parent
                if key.fileobj is listening:
                    client, _ = listening.accept()
                    asking[client], unread[client] = set(), b""
                    ready.register(client, selectors.EVENT_READ)
                    continue
                client = key.fileobj  # type: ignore[assignment]
                try:
                    said = client.recv(1 << 16)
                except ConnectionResetError:
                    said = b""
                *lines, unread[client] = (unread[client] + said).split(b"\n")
                for line in lines:
                    work, reply = _answered(json.loads(line), asking[client], statuses)
                    if work is not None:
                        for each in (listening, *asking):
                            each.close()
                        return work
                    with contextlib.suppress(BrokenPipeError):  # it has gone meanwhile
                        client.sendall(json.dumps(reply).encode() + b"\n")
                if not said:
                    ready.unregister(client)
                    _end(asking[client], asking.pop(client), statuses)
                    client.close()


def _answered(
    question: dict[str, Any], running: set[int], statuses: dict[int, int]
) -> tuple[Callable[[], object] | None, dict[str, Any]]:
    """The answer; or in a rank that was asked for, what it is to do."""
    answer: Any = None
    if "start" in question:
        try:
            function = _found(question)
        except Exception as error:
            return None, {"number": question["number"], "failed": f"{type(error).__name__}: {error}"}
        gc.freeze()  # what is here stays: ranks need not look through it, nor copy it by doing so
        answer = []
        for rank, file in enumerate(question["said"]):
            child = os.fork()
            if child == 0:
                die_with_parent()
                signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell switches off in the background
                _print_into(file)
                return functools.partial(function, rank, question["ranks"], *question["words"]), {}
            answer.append(child)
        running.update(answer)
    elif "end" in question:
        _end(running.intersection(question["end"]), running, statuses)
    else:
        _reap(running, statuses)
        answer = {pid: statuses[pid] for pid in question["statuses"] if pid in statuses}
    return None, {"number": question["number"], "answer": answer}


def _found(question: dict[str, Any]) -> Callable[..., object]:
    for name in (*_MODULES, *filter(None, [question["imports"]])):
        module = import_module(name)
        if not _HAS_GPU:
            getattr(module, "before_ranks", bool)()
    home, _, path = question["start"].partition(":")
    function: Callable[..., object] = getattr(import_module(home), path)
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
    """Serve; a rank returns from there and does its work."""
    die_with_parent()
    # Whether there is a GPU is asked without its driver: what has asked the driver has no GPU after a fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    work = _serve(socket.socket(fileno=int(sys.argv[1])))
    if work is not None:
        work()


if __name__ == "__main__":
    main()
