"""A word while the user waits."""

import io
import re
import sys
import time

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
            time.sleep(0.2)
        assert re.sub(r"\d+ s", "0 s", written.getvalue()) == wanted
