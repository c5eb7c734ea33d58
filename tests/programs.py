"""Programs in processes that have torch already: to import it takes most of the time of a short one.

They are forked from the launcher, and then do what `python -m gapless ...`, `python -c ...` or `python script.py` does,
in a folder and an environment of their own. A test about what a program imports starts a real one.
"""

import atexit
import gc
import os
import runpy
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import NamedTuple

from tests.launcher import Launcher

_POLL = 0.02


class Ended(NamedTuple):
    """How a program has ended, and what it has printed."""

    code: int
    out: str
    err: str


class Program:
    """One that runs."""

    def __init__(self, launcher: Launcher, pid: int, out: Path, err: Path) -> None:
        self._launcher, self.pid, self._out, self._err = launcher, pid, out, err

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    @property
    def code(self) -> int | None:
        return self._launcher.statuses([self.pid]).get(self.pid)

    @property
    def out(self) -> str:
        return self._out.read_text("utf-8") if self._out.exists() else ""

    def until_it_says(self, words: str, within: float = 100.0) -> None:
        """Waits for a line that begins with these words."""
        deadline = time.monotonic() + within
        while not any(line.startswith(words) for line in self.out.splitlines()):
            assert self.code is None, self.ended()
            assert time.monotonic() < deadline, f"it never said {words!r}: {self.out}"
            time.sleep(_POLL)

    def ended(self, within: float = 100.0) -> Ended:
        """Waits for its end."""
        deadline = time.monotonic() + within
        while (code := self.code) is None:
            assert time.monotonic() < deadline, f"it did not end within {within:.0f} s: {self.out}"
            time.sleep(_POLL)
        return Ended(code, self.out, self._err.read_text("utf-8") if self._err.exists() else "")


class Programs:
    """Starts them; the fixture `programs`."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self._launcher, self._folder, self._number = launcher, folder, 0

    @contextmanager
    def start(
        self, *words: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> Iterator[Program]:
        """`gapless` or `benchmarks` and its words, `-c` and a text, or a file and its words. It is killed if it is
        still there.
        """
        self._number += 1
        out, err = (self._folder / f"{self._number}.{name}" for name in ("out", "err"))
        settings = [f"{name}={value}" for name, value in (environment or {}).items()]
        called = (str(err), str(cwd or self._folder), str(len(settings)), *settings, *words)
        (pid,) = self._launcher.start(_program, 1, *called, said=[out])
        try:
            yield Program(self._launcher, pid, out, err)
        finally:
            self._launcher.end([pid])

    def run(self, *words: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> Ended:
        with self.start(*words, cwd=cwd, environment=environment) as program:
            return program.ended()


def _program(_rank: int, _ranks: int, err: str, folder: str, count: str, *rest: str) -> None:
    settings, words = rest[: int(count)], rest[int(count) :]
    os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.chdir(folder)
    os.environ.update(setting.partition("=")[::2] for setting in settings)
    if os.environ.get("PYTHONWARNINGS") == "error":
        warnings.simplefilter("error")
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, TextIOWrapper)
        stream.reconfigure(encoding="utf-8")
    if "triton" in sys.modules:
        atexit.register(gc.unfreeze)  # it counts what it has left when a program ends, and says so
    sys.argv = list(words)
    if words[0] in ("gapless", "benchmarks"):
        main = import_module({"gapless": "gapless.cli", "benchmarks": "benchmarks.runner.command"}[words[0]]).main
        sys.exit(main(list(words[1:])))
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")
