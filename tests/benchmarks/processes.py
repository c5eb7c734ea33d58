"""Which processes are there: read from /proc, so these tests run on Linux."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc, which this system has not")


def _all() -> Iterator[tuple[int, int, str]]:
    """(process, parent, state)"""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                rest = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except (OSError, IndexError):
                continue  # it has gone meanwhile
            yield int(entry.name), int(rest[1]), rest[0]


def below(ancestor: int | None = None) -> set[int]:
    """All living descendants of a process, by default of this one."""
    parents = {process: parent for process, parent, state in _all() if state != "Z"}
    found = {os.getpid() if ancestor is None else ancestor}
    while more := {process for process, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid() if ancestor is None else ancestor}


def alive(processes: set[int]) -> set[int]:
    return {process for process, _, state in _all() if process in processes and state != "Z"}


def until(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
