"""Threads of light devices run on one core, those of busy ones on all."""

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from gapless.run.team import Team

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="there is one core, or no choice"
)


def _cores(team: Team) -> set[int]:
    found: set[int] = set()
    for thread in team._threads:
        found |= os.sched_getaffinity(thread.native_id or 0)
    return found


def _wait() -> None:
    time.sleep(0.02)


def _compute() -> None:
    end = time.thread_time() + 0.1
    while time.thread_time() < end:
        pass


def _run(team: Team, task: Callable[[], None], kind: int = 0) -> None:
    team.run([task, task], lambda: None, kind)


@pytest.fixture
def team() -> Iterator[Team]:
    made = Team(["one", "two"], intra_op_threads=1)
    yield made
    made.close()


def test_waiting_devices_share_a_core(team: Team) -> None:
    _run(team, _wait)
    assert len(_cores(team)) > 1, "the first run is cold"
    _run(team, _wait)
    assert len(_cores(team)) == 1
    assert len(os.sched_getaffinity(threading.get_native_id())) > 1, "the caller stays where it is"


def test_a_run_that_takes_longer_on_one_core_gets_all_cores_back(team: Team) -> None:
    _run(team, _wait)
    _run(team, _wait)
    assert len(_cores(team)) == 1
    _run(team, _compute)
    assert _cores(team) == os.sched_getaffinity(0)
    _run(team, _wait)
    assert _cores(team) == os.sched_getaffinity(0), "after a wrong guess it takes two light runs"
    _run(team, _wait)
    assert len(_cores(team)) == 1


def test_kinds_of_runs_are_not_compared_with_each_other(team: Team) -> None:
    """A short run on all cores says nothing about a long one on one."""
    for _ in range(2):
        _run(team, _wait)
    assert len(_cores(team)) == 1
    seen: list[int] = []
    _run(team, lambda: seen.append(len(os.sched_getaffinity(0))), kind=1)
    assert min(seen) > 1, "of this kind nothing is known yet"
    assert len(_cores(team)) > 1
    _run(team, _wait)
    assert len(_cores(team)) == 1


def test_devices_with_several_intra_op_threads_are_left_alone() -> None:
    team = Team(["one", "two"], intra_op_threads=2)
    _run(team, _wait)
    _run(team, _wait)
    assert _cores(team) == os.sched_getaffinity(0)
    team.close()


def test_one_device_is_left_alone() -> None:
    team = Team(["one"], intra_op_threads=1)
    team.run([_wait], lambda: None)
    assert _cores(team) == os.sched_getaffinity(0)
    team.close()
