"""Ranks agree on a part of the store that nobody has used: whoever was there before, comes late or dies meanwhile."""

import contextlib
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch._C._distributed_c10d import HashStore, TCPStore

from gapless import distributed
from gapless.distributed import agreed_name
from gapless.errors import TransportError
from tests.run.crew import free_port
from tests.run.forked import Launch
from tests.run.hosts import ROOT, two_hosts
from tests.run.torchrun import Torchrun
from tests.test_docs import blocks


class DeadError(Exception):
    pass


class Rank:
    """A process that agrees with others, as a thread: it dies when it has asked the store so many times, or is told."""

    def __init__(self, store: Any, rank: int, size: int, lives: float = float("inf"), late: float = 0.0) -> None:
        self.name, self.rank, self._store, self._lives = "", rank, store, lives
        self.thread = threading.Thread(target=self._run, args=(rank, size, late), daemon=True)
        self.thread.start()

    def _run(self, rank: int, size: int, late: float) -> None:
        time.sleep(late)
        with contextlib.suppress(DeadError, TransportError):
            self.name = agreed_name(self, rank, size, 60.0)

    def kill(self) -> None:
        self._lives = 0
        self.thread.join(60)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self._lives -= 1
        if self._lives < 0:
            raise DeadError
        method: Callable[..., Any] = getattr(self._store, name)
        return method


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_PAUSE", 0.001)


def names_of(ranks: list[Rank]) -> set[str]:
    for each in ranks:
        each.thread.join(60)
    return {each.name for each in ranks}


@pytest.mark.parametrize("seed", range(8))
def test_all_ranks_have_one_name_that_no_earlier_start_had(seed: int) -> None:
    """Some starts end with the death of a rank, anywhere in the agreement, and then of all."""
    chance, store, used = random.Random(seed), HashStore(), set[str]()
    size = chance.randint(1, 5)
    for start in range(12):
        dies = chance.randrange(size) if start % 3 else None
        lives = [chance.randint(0, 40) if rank == dies else float("inf") for rank in range(size)]
        ranks = [Rank(store, rank, size, lives[rank], chance.choice((0, 0.02))) for rank in range(size)]
        if dies is None:
            (name,) = names_of(ranks)
            assert name
            assert name not in used
        else:
            ranks[dies].thread.join(60)
            time.sleep(chance.choice((0, 0.01)))
            for each in ranks:
                each.kill()
        found = {each.name for each in ranks} - {""}
        assert len(found) <= 1
        assert not found & used
        used |= found


@pytest.mark.parametrize("again", [0, 2])
def test_a_rank_that_is_started_again_while_the_others_wait_is_taken_in(again: int) -> None:
    """With --node-rank every agent starts its own ranks again and tells nobody."""
    store = HashStore()
    ranks = [Rank(store, rank, 4) for rank in range(3)]  # rank 3 is late
    time.sleep(0.05)
    ranks[again].kill()
    ranks[again] = Rank(store, again, 4)
    time.sleep(0.05)
    (name,) = names_of([*ranks, Rank(store, 3, 4)])
    assert name


def test_a_rank_that_is_missing_is_named() -> None:
    store = HashStore()
    names_of([Rank(store, rank, 4) for rank in range(4)])  # who was here before does not count
    words: list[str] = []

    def wait(rank: int) -> None:
        try:
            agreed_name(store, rank, 4, 1.5)
        except TransportError as error:
            words.append(str(error))

    for here, sentence in (
        ((0, 1, 2), "rank 3 of 4 has not joined within 1.5 s: check its output, and that torchrun runs on every"),
        ((0, 1), "ranks 2, 3 of 4 have not joined within 1.5 s: "),
        ((1, 2, 3), "rank 0 of 4 has not joined within 1.5 s: "),
    ):
        threads = [threading.Thread(target=wait, args=(rank,)) for rank in here]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(words) == len(here)
        assert all(re.match(re.escape(sentence), each) for each in words), words
        words.clear()


def test_a_rank_whose_place_was_taken_ends() -> None:
    store, others = HashStore(), list[Rank]()

    def again() -> None:
        while not store.check(["rank 1"]):
            time.sleep(0.01)
        others.append(Rank(store, 1, 2))

    thread = threading.Thread(target=again)
    thread.start()
    with pytest.raises(TransportError, match="rank 1 was restarted while this one waited"):
        agreed_name(store, 1, 2, 60.0)
    thread.join()
    (name,) = names_of([*others, Rank(store, 0, 2)])
    assert name


def started(port: str, late: str) -> None:
    """A rank, as torchrun starts it the first time and later: the store is that of the agent."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()  # that of all such tests
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    time.sleep(rank * float(late))
    distributed.init_process_group("gloo", timedelta(seconds=60))
    ranks = torch.tensor(rank)
    dist.all_reduce(ranks)
    assert ranks == 1


def test_ranks_that_are_started_again_find_each_other_and_not_the_dead(launch: Launch) -> None:
    """The address of the last rank 1 is in the store before the new one has written its own."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for late in ("0", "0.5"):
        launch(started, 2, str(agent.port), late)


def test_a_store_that_is_not_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", free_port()), ("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(TransportError, match="this rank can't reach torchrun's store: "):
        distributed.init_process_group("gloo", timedelta(seconds=1))


@pytest.mark.slow
def test_the_script_of_the_docs_goes_on_after_a_kill_on_the_other_host(tmp_path: Path) -> None:
    """With the bits of one process that nothing has happened to."""
    (script,) = (each for each in blocks(ROOT / "docs" / "failures.md", "text") if "init_process_group" in each)
    (tmp_path / "train.py").write_text(script)
    with two_hosts() as hosts:
        job = Torchrun(hosts, tmp_path, 1, ["train.py"])
        job.wait_for(lambda: (tmp_path / "runs" / "mine" / "step-00000050").exists())
        (rank,) = job.ranks_of(1)
        os.kill(rank, signal.SIGKILL)
        job.end()
    assert job.said().count("failed (exitcode: -9)") == 1
    assert job.said().count("failed (exitcode: ") <= 2, job.said()  # one restart on each host
    alone = re.sub(r"^(init_process_group|mesh =|torch.distributed).*\n", "", script, flags=re.MULTILINE)
    names: dict[str, Any] = {}
    exec(alone.replace("mesh=mesh", "devices=2").replace("runs/mine", f"{tmp_path}/one"), names)
    files = (tmp_path / "runs" / "mine" / "step-00000300").glob("*-model-*.safetensors")
    found = {name: weight for file in files for name, weight in load_file(file).items()}
    assert all(torch.equal(found[f"model.{name}"], each) for name, each in names["model"].state_dict().items())
