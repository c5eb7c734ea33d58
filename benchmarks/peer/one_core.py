"""Threads that wait more than they compute, on one core: emulated devices, and layers too small to matter.

They wake on whichever core is free, and the interpreter's lock and the caches travel with them, which is what such a
benchmark would measure. Layers of a real model keep a core busy, and gain nothing from it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def on_one_core() -> Iterator[None]:
    """Threads that start in here stay on one core; the caller is back on all of them afterwards."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[os.getpid() % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
