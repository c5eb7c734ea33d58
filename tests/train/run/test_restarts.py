"""Two hosts, torchrun on each: whatever is killed or cut off, the run goes on by itself, and ends with the bits of one
that nothing has happened to.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gapless.checkpoint.listing import saved_in
from tests.run.hosts import two_hosts
from tests.run.torchrun import Torchrun
from tests.train.configs import write
from tests.train.run.test_ranks import _SET, assert_same, in_one_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PACE = 0.1  # seconds: a step takes as long at least


@contextmanager
def training(folder: Path, ranks: int, steps: int) -> Iterator[Torchrun]:
    """Has trained some steps when it comes, and all of them when it goes."""
    devices = ", ".join(['"cpu"'] * 2 * ranks)
    config = write(folder, ("steps = 6", f"steps = {steps}"), ('"cpu", "cpu"', devices))
    in_one_process(config, folder / "one")
    mine = folder / "mine.py"
    mine.write_text(
        mine.read_text().replace("        yield x, x", f"        time.sleep({PACE}); yield x, x") + "\nimport time\n"
    )
    with two_hosts() as hosts:
        words = ("-m", "gapless", "train", *_SET, "--folder", "ranks", str(config))
        job = Torchrun(hosts, folder, ranks, words)
        wait_for_a_save(job)
        yield job
        job.end()
    assert_same(config, folder / "one", folder / "ranks")


def last_saved(job: Torchrun) -> int:
    saves = job.folder / "ranks" / "checkpoints"
    return max((each.step for each in saved_in(saves)), default=0) if saves.is_dir() else 0


def wait_for_a_save(job: Torchrun) -> None:
    """Another one."""
    before = last_saved(job)
    job.wait_for(lambda: last_saved(job) > before)


def starts(job: Torchrun) -> int:
    return len(re.findall(r"^run: ranks, resumed after step \d+", job.said(), re.MULTILINE))


def test_a_kill_of_each_rank_and_of_all_ranks_of_each_host_costs_one_restart(tmp_path: Path) -> None:
    with training(tmp_path, ranks=2, steps=60) as job:
        for host, which in ((0, [0]), (0, [1]), (1, [0]), (1, [1]), (0, [0, 1]), (1, [0, 1])):
            before, ranks = starts(job), job.ranks_of(host)
            for each in which:
                os.kill(ranks[each], signal.SIGKILL)
            job.wait_for(lambda before=before: starts(job) > before)  # type: ignore[misc]
            wait_for_a_save(job)
    assert starts(job) == 6


def test_a_connection_that_is_lost_for_a_while_costs_nothing_and_a_kill_after_it_one_restart(tmp_path: Path) -> None:
    """torchrun takes the other host for dead after 15 s."""
    with training(tmp_path, ranks=1, steps=100) as job:
        with job.hosts.cut():
            time.sleep(1)
            before = last_saved(job)
            time.sleep(24)
            assert last_saved(job) <= before + 2
        wait_for_a_save(job)
        assert starts(job) == 0
        os.kill(job.ranks_of(1)[0], signal.SIGKILL)
    assert starts(job) == 1


def test_an_agent_that_is_killed_is_started_again_while_its_ranks_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this variable torchrun 2.13 tells a new agent of no store, and waits in vain for it."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with training(tmp_path, ranks=1, steps=300) as job:
        job.kill_agent(1)
        job.agents[1] = job.start(1)
        job.wait_for(lambda: starts(job) > 0)
    assert starts(job) == 1
