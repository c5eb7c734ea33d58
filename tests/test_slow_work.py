"""A word while the user waits."""

import io
import re
import sys
import time
from types import SimpleNamespace

import pytest

from gapless import slow_work


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (io.StringIO, "gapless: tracing (again): 0 s\n"),
        (Terminal, "gapless: tracing (again) ... 0 s\n"),
    ],
)
def test_long_work_is_named(monkeypatch: pytest.MonkeyPatch, file: type[io.StringIO], said: str) -> None:
    for rank, long, wanted in (("0", 0.05, said), ("1", 0.05, ""), ("0", 60.0, "")):
        monkeypatch.setattr(slow_work, "_LONG", long)
        monkeypatch.setenv("RANK", rank)
        written = file()
        monkeypatch.setattr(sys, "stderr", written)
        with slow_work.slow_work("tracing", "again"):
            time.sleep(0.1)
            while wanted and file is Terminal and not written.getvalue():  # another thread speaks when it may run
                time.sleep(0.01)
        assert re.sub(r"\d+ s", "0 s", written.getvalue()) == wanted


def test_a_terminal_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(slow_work, "_LONG", 600.0)
    monkeypatch.setattr(slow_work, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(sys, "stderr", written := Terminal())
    with slow_work.slow_work("reading weights", "4 GiB") as tell:
        tell("1 GiB")  # too early
        now[0] = 601.0
        tell("3 GiB")
    assert written.getvalue() == "\r\x1b[Kgapless: reading weights (4 GiB): 3 GiB ... 601 s\n"
