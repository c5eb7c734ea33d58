"""Whether another process of this host is alive, from the process itself: a connection to it may stay open when it is
dead, since children that it has forked have it too.
"""

import contextlib
import faulthandler
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_LOG = logging.getLogger("gapless")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = "/proc/self/ns/pid"
_DEAD = "ZX"


def this_process() -> list[str | int]:
    """By which others can find it: the host and its numbers, the number, and when it began. Empty where that can't be
    known.
    """
    with contextlib.suppress(OSError, ValueError):
        host = f"{_BOOT.read_text().strip()} {os.readlink(_NAMESPACE)}"
        return [host, os.getpid(), _stat(os.getpid())[1]]
    return []


class Life:
    """Of another process. `found` is None where it can't be seen: on another host, or in another container."""

    def __init__(self, process: int, began: int) -> None:
        self._process, self._began = process, began

    @classmethod
    def found(cls, words: Sequence[str | int]) -> "Life | None":
        """From what `this_process` says there."""
        here = this_process()
        if not here or not words or words[0] != here[0]:
            return None
        return cls(int(words[1]), int(words[2]))

    @property
    def is_over(self) -> bool:
        """Whether it has ended, collected or not; its number may be another's by now."""
        try:
            state, began = _stat(self._process)
        except (FileNotFoundError, ProcessLookupError):
            return not self._is_hidden()
        except (OSError, ValueError):
            return False
        return state in _DEAD or began != self._began

    def _is_hidden(self) -> bool:
        """From this user."""
        try:
            os.kill(self._process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True


def _stat(process: int) -> tuple[str, int]:
    """Its state, and when it began. The name, in brackets, may hold anything."""
    words = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return words[0], int(words[19])


def dump_stacks() -> None:
    """What the threads of this process are doing, to its errors."""
    file: Any = sys.stderr
    try:
        file.flush()
        file.fileno()
    except (AttributeError, OSError, ValueError):
        file = 2
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        faulthandler.dump_traceback(file=file)


def end_process(words: str) -> None:
    """At once, with these words."""
    _LOG.critical("gapless: %s", words)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(1)
