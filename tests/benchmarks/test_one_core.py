"""Light threads of a benchmark share a core; their starter does not."""

import os
import threading

import pytest

from benchmarks.peer.gapless_sides import on_one_core

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="there is one core, or no choice"
)


def test_threads_that_start_there_stay_on_one_core() -> None:
    before, seen = os.sched_getaffinity(0), list[set[int]]()
    with on_one_core():
        thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
    assert len(seen[0]) == 1
    assert os.sched_getaffinity(0) == before
