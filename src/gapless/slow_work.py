"""A word on stderr where the user waits for more than a second, and does not know for what."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

_LONG = 1.0  # seconds
_OFTEN = 0.2  # between two words of how far it is


@contextmanager
def slow_work(what: str, why: str = "") -> Iterator[Callable[[str], None]]:
    """Around something that may take long: `what` is "tracing the model". Of several ranks the first one speaks. The
    function that it gives may be told how far it is, which a terminal shows.
    """
    if sys.stderr is None or int(os.environ.get("RANK", "0")) > 0:
        yield lambda far: None
        return
    file, text, start = sys.stderr, f"gapless: {what}{why and f' ({why})'}", time.monotonic()
    live, next_word = file.isatty(), start + _LONG
    timer = Timer(_LONG, lambda: print(f"{text} ...", end="", file=file, flush=True))
    timer.daemon = True
    if live:
        timer.start()

    def tell(far: str) -> None:
        nonlocal next_word
        if live and time.monotonic() >= next_word:
            timer.cancel()
            next_word = time.monotonic() + _OFTEN
            print(f"\r\x1b[K{text}: {far} ...", end="", file=file, flush=True)

    try:
        yield tell
    finally:
        timer.cancel()
        seconds = time.monotonic() - start
        if seconds >= _LONG:
            print(f" {seconds:.0f} s" if live else f"{text}: {seconds:.0f} s", file=file, flush=True)
