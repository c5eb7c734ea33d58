"""A word on stderr where the user waits for more than a second, and does not know for what."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

_LONG = 1.0  # seconds


@contextmanager
def slow_work(what: str, why: str = "") -> Iterator[None]:
    """Around something that may take long: `what` is "tracing the model". Of several ranks the first one speaks."""
    if sys.stderr is None or int(os.environ.get("RANK", "0")) > 0:
        yield
        return
    file, text, start = sys.stderr, f"gapless: {what}{why and f' ({why})'}", time.monotonic()
    live = file.isatty()
    timer = Timer(_LONG, lambda: print(f"{text} ...", end="", file=file, flush=True))
    timer.daemon = True
    if live:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        seconds = time.monotonic() - start
        if seconds >= _LONG:
            print(f" {seconds:.0f} s" if live else f"{text}: {seconds:.0f} s", file=file, flush=True)
