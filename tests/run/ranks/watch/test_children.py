"""Children that a rank forks: they are no ranks, end nothing of their parent's, and do not hide its end."""

import ctypes
import gc
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gapless
from gapless.errors import TransportError
from gapless.run.ranks.watch.processes import Life, this_process
from tests.pipelines import Do, mlp
from tests.run.crew import POLL, Awake, Server
from tests.run.ranks.watch.test_watch import X, Y, pipeline, say

_FORK = multiprocessing.get_context("fork")


# -- a child that ends -------------------------------------------------------------------------------------------------


def forks_and_goes_on() -> None:
    """Its children leave as programs do, with everything that Python and torch take down at the end."""
    pipe = pipeline()
    for number, way in enumerate(("returns", "collects", "closes", "exits")):
        pipe.step(X, Y)
        if number % 2 != dist.get_rank():
            continue
        child = os.fork()
        if child == 0:
            if way == "collects":
                del pipe
                gc.collect()
            elif way == "closes":
                with pipe:
                    pass
            elif way == "exits":
                sys.exit(0)
            return
        assert os.waitpid(child, 0) == (child, 0)
    loss = pipe.step(X, Y).loss
    pipe.close()
    say(f"fine {loss}")


def test_a_child_that_ends_takes_nothing_of_its_parent_along(server: Server, tmp_path: Path) -> None:
    """Its finalizer once said goodbye in the name of the rank; torch's own group hangs in such a child as well."""
    with server.crew(forks_and_goes_on, 2, folder=tmp_path) as crew:
        assert crew.ended() == {0: 0, 1: 0}, crew.everything()
        assert all(crew.said(rank).startswith("fine") for rank in range(2)), crew.everything()


def has_daemons() -> None:
    pipe = pipeline()
    pipe.step(X, Y)
    daemons = [_FORK.Process(target=time.sleep, args=(1000,), daemon=True) for _ in range(2)]
    for daemon in daemons:
        daemon.start()
    daemons[0].terminate()
    for _ in range(20):  # at once, when some still had the handler of their parent, and lost the signal
        daemons[0].join(30)
        assert daemons[0].exitcode == -signal.SIGTERM
        daemons[0] = _FORK.Process(target=time.sleep, args=(1000,), daemon=True)
        daemons[0].start()
        daemons[0].terminate()
    pipe.step(X, Y)
    say(f"fine {daemons[1].pid}")


def test_daemons_can_be_terminated_and_end_with_the_program(server: Server, tmp_path: Path) -> None:
    """They had the handler of SIGTERM that only takes a note."""
    with server.crew(has_daemons, 2, folder=tmp_path) as crew:
        assert crew.ended(seconds=30) == {0: 0, 1: 0}, crew.everything()
        for rank in range(2):
            assert not Path(f"/proc/{crew.said(rank).split()[1]}").exists()


# -- a child that works ------------------------------------------------------------------------------------------------


def works_in_a_child() -> None:
    pipe = pipeline()
    pipe.step(X, Y)
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: pipe.step(X, Y),
        "evaluate": lambda: pipe.evaluate(X),
        "state_dict": pipe.state_dict,
    }

    def child() -> None:
        for name, call in calls.items():
            with pytest.raises(TransportError, match=r"is a forked child of rank \d \(process \d+\) and has no conn"):
                call()
            say(name)

    process = _FORK.Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
    pipe.step(X, Y)
    say("fine")


def test_a_child_is_no_rank_and_is_told_so(server: Server, tmp_path: Path) -> None:
    """It waited for ranks that do not know it."""
    with server.crew(works_in_a_child, 2, folder=tmp_path) as crew:
        assert crew.ended() == {0: 0, 1: 0}, crew.everything()
        assert [crew.said(rank) for rank in range(2)] == ["step\nevaluate\nstate_dict\nfine\n"] * 2


def _exit_code(work: object) -> int | None:
    process = _FORK.Process(target=work)  # type: ignore[arg-type]
    process.start()
    process.join(60)
    process.kill()
    return process.exitcode


@pytest.mark.parametrize("threads", [1, 2])
def test_a_pipeline_of_one_process_goes_on_in_a_child(threads: int) -> None:
    """A step waited for threads that a child does not have: it makes new ones. The same bits on both sides."""
    with gapless.Pipeline(mlp(), devices=2, microbatches=4, loss=F.mse_loss, intra_op_threads=threads) as pipe:
        pipe.step(X, Y)
        pipe.zero_grad()

        def child() -> None:
            pipe.step(X, Y)
            torch.save([parameter.grad for parameter in pipe.parameters()], read_end)
            pipe.close()

        with open(os.memfd_create("grads"), "w+b") as read_end:
            assert _exit_code(child) == 0
            read_end.seek(0)
            theirs = torch.load(read_end)
        pipe.steps = 1
        pipe.step(X, Y)
        for parameter, grad in zip(pipe.parameters(), theirs, strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, grad)


def test_a_child_forked_in_the_middle_of_a_step_is_told_so() -> None:
    codes: list[int | None] = []

    def fork(x: torch.Tensor) -> torch.Tensor:
        def child() -> None:
            with pytest.raises(TransportError, match="in the middle of a step, and it has only a part"):
                pipe.step(X, Y)

        if not codes:
            codes.append(_exit_code(child))
        return x

    with gapless.Pipeline([nn.Linear(6, 6), Do(fork)], devices=2, microbatches=1, loss=F.mse_loss) as pipe:
        pipe.step(X, Y)
    assert codes == [0]


# -- a child that lives on ---------------------------------------------------------------------------------------------


def has_a_child(way: str, victim: str) -> None:
    """`libc`: a fork that Python knows nothing of."""
    pipe = pipeline(timeout=60.0)
    pipe.step(X, Y)
    if pipe._world.position.device == int(victim):  # type: ignore[attr-defined]
        child = ctypes.CDLL(None).fork() if way == "libc" else os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        say(f"child {child}")
    say("ready")
    while True:
        pipe.step(X, Y)
        time.sleep(0.01)


def kill_a_parent(server: Server, folder: Path, ranks: int, way: str, victim: int) -> float:
    """The seconds until the last of the others has said who is dead. Its child lives."""
    with server.crew(has_a_child, ranks, way, victim, folder=folder) as crew:
        crew.wait_for("ready")
        child = int(crew.said(victim).split()[1])
        survivors = [rank for rank in range(ranks) if rank != victim]
        awake = Awake()
        crew.signal(victim, signal.SIGKILL)
        while not all(f"rank {victim} is dead" in crew.said(rank) for rank in survivors):
            assert awake.tick() < 30, crew.everything()
            time.sleep(POLL)
        took = awake.tick()
        assert Path(f"/proc/{child}").exists()
        os.kill(child, signal.SIGKILL)
        assert set(crew.ended(survivors, 30).values()) == {1}, crew.everything()
    return took


@pytest.mark.parametrize("way", ["python", "libc"])
def test_a_dead_rank_whose_child_lives_is_noticed(server: Server, tmp_path: Path, way: str) -> None:
    """The child has the connections too, so they stay open."""
    assert kill_a_parent(server, tmp_path, 2, way, victim=1) < 30


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(11, 21))
def test_fifty_dead_ranks_whose_children_live_are_noticed_within_three_seconds(
    server: Server, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    took = []
    for number in range(5):
        ranks = chance.choice([2, 3, 4])
        took.append(kill_a_parent(server, tmp_path, ranks, ("python", "libc")[number % 2], chance.randrange(ranks)))
    print(f"seed {seed}: after {', '.join(f'{seconds:.2f}' for seconds in sorted(took))} s")
    assert max(took) < 3


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_children_end_again_and_again_and_daemons_with_the_program(server: Server, tmp_path: Path) -> None:
    for _ in range(5):
        with server.crew(forks_and_goes_on, 2, folder=tmp_path) as crew:
            assert crew.ended() == {0: 0, 1: 0}, crew.everything()
        with server.crew(has_daemons, 2, folder=tmp_path) as crew:
            assert crew.ended(seconds=30) == {0: 0, 1: 0}, crew.everything()


def test_a_process_is_alive_until_it_ends_whoever_has_its_number() -> None:
    process = _FORK.Process(target=time.sleep, args=(1000,))
    process.start()
    host, _, began = this_process()
    assert process.pid is not None
    stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    life = Life.found([host, process.pid, int(stat[19])])
    assert life is not None
    assert not life.is_over
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and not yet collected
    assert life.is_over
    process.join()
    assert life.is_over
    other = Life.found([host, os.getpid(), int(began) - 1])
    assert other is not None
    assert other.is_over
    assert Life.found(["another host", os.getpid(), began]) is None
    assert Life.found([]) is None
