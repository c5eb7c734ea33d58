"""Ranks that fail, die, sleep, disagree or are asked to leave: everybody knows what happened and where, and nobody
stays.
"""

import contextlib
import logging
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gapless
from gapless.errors import ConfigError, PartitionError, TransportError
from gapless.run.ranks.timing import stragglers
from gapless.run.ranks.watch import watch
from gapless.run.ranks.watch.ring import pairs
from tests.pipelines import Do, alive, resident, schedule_named
from tests.run.crew import Server, leave
from tests.run.forked import Launch
from tests.run.test_failures import BoomError, Fragile, model_of

X, Y = torch.ones(16, 6), torch.zeros(16, 6)


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))


def pipeline(model: Any = None, **options: Any) -> gapless.Pipeline:
    asked: dict[str, Any] = {"mesh": line(), "microbatches": 4, "loss": F.mse_loss, "timeout": 20.0, **options}
    return gapless.Pipeline(model_of(dist.get_world_size()) if model is None else model, **asked)


def say(words: str) -> None:
    os.write(1, f"{words}\n".encode())  # in one piece: ranks share what they write to


# -- a rank dies -------------------------------------------------------------------------------------------------------


class Slow(nn.Module):
    """Takes its time without the interpreter's lock, as a kernel does."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Any:
        time.sleep(self.seconds)
        return self.linear(x)


def trains(timeout: str, schedule: str = "1f1b", replicas: str = "1") -> None:
    """As a user would: no except anywhere, no close, for ever."""
    count = 2 if schedule == "zb-v" else 1
    mesh = init_device_mesh("cpu", (int(replicas), dist.get_world_size() // int(replicas)), mesh_dim_names=("dp", "pp"))
    model = nn.Sequential(*(Slow(0.002) for _ in range(count * mesh.size(1))))
    pipe = pipeline(model, schedule=schedule, timeout=float(timeout), mesh=mesh)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
    while True:
        pipe.step(X, Y)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if pipe.steps == 1:
            say("ready")


PLACE = r"stage \d+, (microbatch \d+, which \d+[FBIW]\d+ needs|action \d+[FBIW]\d+)"


def kill_one(server: Server, folder: Path, chance: random.Random) -> float:
    """Some rank at some moment; the seconds until the last of the others had ended, each with the right words."""
    ranks, replicas = chance.choice([(2, 1), (3, 1), (4, 1), (4, 2)])
    victim = chance.randrange(ranks)
    schedule = chance.choice(["1f1b", "gpipe", "zb-h1", "zb-v"])
    with server.crew(trains, ranks, 20.0, schedule, replicas, folder=folder) as crew:
        crew.wait_for("ready")
        time.sleep(chance.random())
        crew.signal(victim, signal.SIGKILL)
        survivors = [rank for rank in range(ranks) if rank != victim]
        statuses = crew.ended(survivors, 30)
        took = crew.took
        assert set(statuses.values()) == {1}, crew.everything()
        crew.ended()
        for rank in survivors:
            said = crew.said(rank)
            last = [line for line in said.splitlines() if "TransportError" in line][-1]
            assert re.search(rf"TransportError: rank {rank} \(device \d\) .*{PLACE}.*: rank {victim} is dead", last), (
                said
            )
            assert "Thread 0x" in said, said  # its stacks
            assert "The above exception" not in said, said
            assert "During handling" not in said, said
        assert crew.left_behind() == []
    return took


def test_a_rank_that_is_killed_is_named_by_all_others_which_end(server: Server, tmp_path: Path) -> None:
    assert kill_one(server, tmp_path, random.Random(2)) < 30


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(20, 30))
def test_a_rank_killed_at_any_of_fifty_moments_is_named_by_all_others(
    server: Server, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    took = [kill_one(server, tmp_path, chance) for _ in range(5)]
    print(f"seed {seed}: after {', '.join(f'{seconds:.1f}' for seconds in sorted(took))} s")
    assert max(took) < 30


# -- a rank sleeps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_is_stopped_is_named_within_the_timeout(server: Server, tmp_path: Path, victim: int) -> None:
    with server.crew(trains, 3, 1.5, folder=tmp_path) as crew:
        crew.wait_for("ready")
        time.sleep(0.7)
        survivors = [rank for rank in range(3) if rank != victim]
        assert set(crew.ended(survivors, 40, stopped=victim).values()) == {1}, crew.everything()
        for rank in survivors:
            said = crew.said(rank)
            silent = rf"TransportError: rank {rank} .*{PLACE}.*: rank {victim} is silent: .* heard nothing for 1.5 s"
            found = re.search(rf"{silent}; when last heard from, ([\d.]+) s ago", said)
            assert found is not None, said
            assert float(found[2]) < 30, said
            assert "Thread 0x" in said, said
        crew.signal(victim, signal.SIGCONT)  # and if it wakes up, it ends as well
        assert crew.ended([victim], 30) == {victim: 1}, crew.everything()
        assert re.search(r"TransportError: rank \d .*: rank \d is (silent|dead)", crew.said(victim)), crew.said(victim)
        assert crew.left_behind() == []


def computes_for_long() -> None:
    """Longer than the timeout, in a layer and outside; then all sleep for longer than that too."""
    model = nn.Sequential(Slow(0.0), Slow(0.0))
    with pipeline(model, timeout=1.6, microbatches=1) as pipe:
        pipe.step(X, Y)
        model[dist.get_rank()].seconds = 2.0 * dist.get_rank()  # type: ignore[assignment]
        pipe.step(X, Y)
        awake: list[int] = []
        signal.signal(signal.SIGCONT, lambda number, _: awake.append(number))
        say("asleep")  # it may be stopped from now on
        while not awake:  # any thread may get the signal, so nothing wakes this one
            time.sleep(0.01)
        pipe.step(X, Y)
    say("fine")
    dist.barrier()  # rank 0 holds the store
    leave()


def test_a_long_computation_is_no_silence_and_a_pause_of_all_ranks_is_none(server: Server, tmp_path: Path) -> None:
    with server.crew(computes_for_long, 2, folder=tmp_path) as crew:
        crew.wait_for("asleep")
        for rank in range(2):
            crew.signal(rank, signal.SIGSTOP)
        time.sleep(2.5)
        for rank in range(2):
            crew.signal(rank, signal.SIGCONT)
        assert crew.ended() == {0: 0, 1: 0}, crew.everything()
        assert all(crew.said(rank) == "asleep\nfine\n" for rank in range(2)), crew.everything()


def makes_other_calls() -> None:
    """The last rank leaves a step out."""
    pipe = pipeline(timeout=1.5)
    pipe.step(X, Y)
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(4.0)
    pipe.step(X, Y)


def test_ranks_that_wait_for_each_other_give_up_after_the_timeout(server: Server, tmp_path: Path) -> None:
    with server.crew(makes_other_calls, 3, folder=tmp_path) as crew:
        assert set(crew.ended().values()) == {1}, crew.everything()
        for rank in range(3):
            assert re.search(
                rf"TransportError: rank {rank} .*{PLACE}.*: no rank has computed anything for 1.5 s", crew.said(rank)
            ), crew.everything()


def the_other_is_in_its_layer() -> None:
    dist.distributed_c10d._get_default_store().wait(["in its layer"])


class Tells(Slow):
    def forward(self, x: Tensor) -> Any:
        if self.seconds:
            dist.distributed_c10d._get_default_store().set("in its layer", "")
        return super().forward(x)


def stays_in_a_layer() -> None:
    """Rank 0 fails while rank 1 is in a layer that nobody can stop."""
    watch._GRACE = 2.0
    model = nn.Sequential(Fragile(), Tells(0.0))
    pipe = pipeline(model, microbatches=4)
    pipe.step(X, Y)
    fragile = model[0]
    assert isinstance(fragile, Fragile)
    if dist.get_rank() == 0:
        fragile.arm("F", 1, first=the_other_is_in_its_layer)
    model[1].seconds = 100.0  # type: ignore[assignment]
    pipe.step(X, Y)


def test_a_process_that_can_not_be_reached_is_ended(server: Server, tmp_path: Path) -> None:
    with server.crew(stays_in_a_layer, 2, folder=tmp_path) as crew:
        assert crew.ended() == {0: 1, 1: 1}, crew.everything()
        assert "rank 0 failed on device 0 (cpu), stage 0, action 0F1: BoomError: in F" in crew.said(1)
        assert "did not come back within 2 s" in crew.said(1)


def stays_in_close() -> None:
    """Rank 0 dies, and what rank 1 closes never ends: a GPU may keep it."""
    watch._GRACE = 2.0
    pipe = pipeline()
    pipe.step(X, Y)
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    pipe._world.links.close = lambda *_: time.sleep(100.0)  # type: ignore[attr-defined]
    pipe.step(X, Y)


def test_a_process_that_can_not_close_its_pipeline_after_a_failure_is_ended(server: Server, tmp_path: Path) -> None:
    """Once in a while a rank over NCCL stayed when another was killed."""
    with server.crew(stays_in_close, 2, folder=tmp_path) as crew:
        assert crew.ended(seconds=30)[1] == 1, crew.everything()
        assert "TransportError: rank 1 (device 1)" in crew.said(1)
        assert "did not come back within 2 s" in crew.said(1)


# -- a rank fails ------------------------------------------------------------------------------------------------------

_CASES = {
    "F": ("1f1b", "none"),
    "B": ("1f1b", "none"),
    "I": ("apart", "none"),
    "W": ("apart", "none"),
    "R": ("gpipe", "stage"),
    "loss": ("1f1b", "none"),
    "courier": ("1f1b", "none"),
}


class Odd:
    """What can't cross between processes."""


def fails_everywhere() -> None:
    """Each kind of action on each rank; what a user would see is printed."""
    me, ranks = dist.get_rank(), dist.get_world_size()
    for kind, (name, remat) in _CASES.items():
        for guilty in range(ranks):
            if (kind == "loss" and guilty != ranks - 1) or (kind == "courier" and guilty == ranks - 1):
                continue
            model: list[Any] = model_of(ranks)
            armed = [False]

            def loss(out: Tensor, goal: Tensor) -> Tensor:
                if armed[0]:  # noqa: B023
                    raise BoomError("in loss")
                return F.mse_loss(out, goal)

            def odd(x: Any) -> Any:
                return (x, Odd()) if armed[0] else x  # noqa: B023

            if kind == "courier":
                model[2 * guilty + 1] = Do(odd)
            schedule = schedule_named(name, ranks, 4)
            say(f"=== {kind} on rank {guilty}")
            with pipeline(model, schedule=schedule, remat=remat, loss=loss) as pipe:
                pipe.step(X, Y)
                if me == guilty:
                    armed[0] = kind in ("loss", "courier")
                    if kind in "FBIWR":
                        model[2 * guilty + 1].arm("F" if kind == "R" else kind, 5 if kind == "R" else 1)
                try:
                    for _ in range(3):  # some have done their part of the first
                        pipe.step(X, Y)
                    say("did not raise")
                except (BoomError, gapless.GaplessError):
                    say(traceback.format_exc())
                with pytest.raises(TransportError, match="closed the connections between the ranks"):
                    pipe.step(X, Y)
            assert not alive()
            dist.barrier()
    leave()


def test_an_exception_at_any_action_on_any_rank_is_shown_once_and_told_to_all(server: Server, tmp_path: Path) -> None:
    with server.crew(fails_everywhere, 3, folder=tmp_path) as crew:
        assert set(crew.ended().values()) == {0}, crew.everything()
        said = [dict(re.findall(r"=== (.*)\n((?:(?!===).*\n)*)", crew.said(rank))) for rank in range(3)]
    assert len(said[0]) == 5 * 3 + 1 + 2
    for case in said[0]:
        kind, guilty = case.split(" on rank ")
        texts = [each[case] for each in said]
        shown = "\n".join(texts)
        own = "a Odd can't cross between processes" if kind == "courier" else "BoomError: in"
        assert sum(re.search(r"^[\w.]*(BoomError|ConfigError): .*", text, re.M) is not None for text in texts) == 1, (
            shown
        )
        assert own in texts[int(guilty)], shown
        for rank, text in enumerate(texts):
            if rank != int(guilty):
                where = (
                    "" if kind == "courier" else rf"stage {guilty}, action {guilty}{'F' if kind == 'loss' else kind}\d"
                )
                assert re.search(
                    rf"TransportError: rank {rank} \(device {rank}\) .*: rank {guilty} failed .*{where}", text
                ), text
                assert "in explode" not in text, text
                assert "The above exception" not in text, text
                assert "During handling" not in text, text


def fails_like_a_program() -> None:
    model = model_of(dist.get_world_size())
    pipe = pipeline(model)
    pipe.step(X, Y)
    fragile = model[3]
    assert isinstance(fragile, Fragile)
    if dist.get_rank() == 1:
        fragile.arm("B", 2)
    while True:
        pipe.step(X, Y)


def test_an_exception_ends_the_programs_of_all_ranks(server: Server, tmp_path: Path) -> None:
    with server.crew(fails_like_a_program, 3, folder=tmp_path) as crew:
        assert crew.ended() == {0: 1, 1: 1, 2: 1}, crew.everything()
        assert crew.everything().count("in explode") == 1
        assert re.search(
            r"BoomError: in B\n.*gapless: raised on device 1 \(cpu\), stage 1, action 1B2\n$", crew.said(1)
        )
        for rank in (0, 2):
            assert "rank 1 failed on device 1 (cpu), stage 1, action 1B2: BoomError: in B" in crew.said(rank)
        assert crew.left_behind() == []


def fails_between_steps() -> None:
    pipe = pipeline()
    pipe.step(X, Y)
    if dist.get_rank() == 1:
        raise ValueError("a sample that nobody can read")
    while True:
        pipe.step(X, Y)


def test_a_program_that_ends_between_two_steps_is_named_with_its_reason(server: Server, tmp_path: Path) -> None:
    with server.crew(fails_between_steps, 2, folder=tmp_path) as crew:
        assert crew.ended() == {0: 1, 1: 1}, crew.everything()
        assert "rank 1 has closed its pipeline after ValueError: a sample that nobody can read" in crew.said(0)


def saves_on_one_rank() -> None:
    pipe = pipeline()
    pipe.step(X, Y)
    if dist.get_rank() == 0:
        pipe.save("nowhere", None)


def test_a_rank_that_alone_makes_a_call_is_told_that_all_must(server: Server, tmp_path: Path) -> None:
    with server.crew(saves_on_one_rank, 2, folder=tmp_path) as crew:
        assert crew.ended() == {0: 1, 1: 0}, crew.everything()
        assert re.search(
            "rank 0 .* was saving a checkpoint.* rank 1 has closed its pipeline: all ranks make the same calls, .*: al"
            r"so save, .* `if rank == 0:`",
            crew.said(0),
        )


def leaves_early() -> None:
    """A rank that has done its last step may go, whatever the others still do; rank 0 holds the store."""
    pipe = pipeline(schedule="zb-h1")
    for _ in range(3):
        pipe.step(X, Y)
    time.sleep(0.7 * dist.get_rank())
    say("fine")


def test_ranks_may_leave_one_after_another(server: Server, tmp_path: Path) -> None:
    with server.crew(leaves_early, 3, folder=tmp_path) as crew:
        assert set(crew.ended().values()) == {0}, crew.everything()
        assert [crew.said(rank) for rank in range(3)] == ["fine\n"] * 3


# -- ranks disagree ----------------------------------------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _disagreements() -> dict[str, tuple[dict[str, Any], str]]:
    """What the last rank asks for instead, and what everybody says."""
    wider = model_of(3)
    wider[4] = nn.Linear(6, 6, bias=False)
    half = model_of(3)
    half[2] = nn.Linear(6, 6, dtype=torch.float64)
    doubled = model_of(3)
    doubled[2] = Doubled(6, 6)
    kinds = "module 2 is Linear(in_features=6, out_features=6, bias=True) on rank 0 and Doubled with code"
    return {
        "microbatches": ({"microbatches": 8}, "microbatches is 4 on rank 0 and 8 on rank 2"),
        "seed": ({"seed": 3}, "seed is 0 on rank 0 and 3 on rank 2"),
        "schedule": ({"schedule": "gpipe"}, "schedule is 1f1b on rank 0 and gpipe on rank 2"),
        "partition": ({"partition": [1, 2, 3]}, "partition is [2, 2, 2] on rank 0 and [1, 2, 3] on rank 2"),
        "remat": ({"remat": "layer"}, 'remat is ["none", "none", "none"] on rank 0 and ["layer", "layer", "layer"] on'),
        "loss": ({"loss": F.l1_loss}, "loss is torch.nn.functional.mse_loss on rank 0 and torch.nn.functional.l1_loss"),
        "loss_weight": ({"loss_weight": "sum"}, "loss_weight is None on rank 0 and 'sum' on rank 2"),
        "batchnorm": ({"batchnorm": "deferred"}, "batchnorm is microbatch on rank 0 and deferred on rank 2"),
        "tied": ({"tied": "exact"}, "tied is summed on rank 0 and exact on rank 2"),
        "timeline": ({"timeline": True}, "timeline is false on rank 0 and true on rank 2"),
        "stages": ({"schedule": "zb-v"}, "stages is 3 on rank 0 and 6 on rank 2"),
        "names": ({"model": wider}, "model 4.bias is float32 (6,) on rank 0 and missing on rank 2"),
        "code": ({"model": doubled}, kinds),  # the ranks trained parts of two models
        "types": ({"model": half}, "model 2.weight is float32 (6, 6) on rank 0 and float64 (6, 6) on rank 2"),
        "torch": ({"torch": "2.11.0"}, f"torch is {torch.__version__} on rank 0 and 2.11.0 on rank 2"),
        "mesh": ({"mesh": ("pp", "dp")}, 'mesh dimensions is ["dp", "pp"] on rank 0 and ["pp", "dp"] on rank 2'),
    }


def disagrees() -> None:
    me = dist.get_rank()
    meshes = {
        names: init_device_mesh("cpu", shape, mesh_dim_names=names)
        for names, shape in {("pp",): (3,), ("dp", "pp"): (1, 3), ("pp", "dp"): (3, 1)}.items()
    }
    version = torch.__version__
    for name, (other, words) in _disagreements().items():
        options: dict[str, Any] = {"mesh": meshes["pp",], "model": model_of(3)}
        if name == "mesh":
            options["mesh"] = meshes["dp", "pp"]
        if me == 2:
            options |= other
            torch.__version__ = options.pop("torch", version)
            if name == "mesh":
                options["mesh"] = meshes[other["mesh"]]
        start = time.monotonic()
        with pytest.raises(ConfigError) as caught:
            pipeline(**options)
        say(f"{name}: {time.monotonic() - start:.2f} s")
        assert str(caught.value).startswith("the ranks disagree: "), str(caught.value)
        assert words in str(caught.value), str(caught.value)
        torch.__version__ = version
        assert not alive(), alive()
    with pytest.raises(PartitionError if me == 2 else TransportError) as refused:  # an error of one rank's own
        pipeline(mesh=meshes["pp",], partition=[1, 1, 1] if me == 2 else None)
    if me != 2:
        assert "rank 2 failed making its pipeline: PartitionError: partition [1, 1, 1]" in str(refused.value)
    if me != 1:
        with pytest.raises(TransportError, match=r"has waited 1 s for rank 1(, 2)? to make the same pipeline"):
            pipeline(timeout=1.0)


def test_ranks_that_disagree_are_refused_with_both_values(launch: Launch) -> None:
    took = [float(seconds) for seconds in re.findall(r": ([\d.]+) s$", launch(disagrees, 3), re.M)]
    assert len(took) == 3 * len(_disagreements())
    assert sorted(took)[-4] < 15, took  # the whole machine may have been stopped once


# -- SIGTERM -----------------------------------------------------------------------------------------------------------


def is_terminated(kind: str) -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    heard = threading.Event()

    def mine(*_: Any) -> None:
        say("my own")
        heard.set()

    if kind == "own":
        signal.signal(signal.SIGTERM, mine)
    with pipeline(nn.Sequential(*(Slow(0.01) for _ in range(3)))) as pipe:
        if kind == "own":
            assert signal.getsignal(signal.SIGTERM) is mine
        try:
            for number in range(5 if kind == "own" else 10000):
                pipe.step(X, Y)
                if number == 0:
                    say("ready")
                while number == 2 and kind == "own" and dist.get_rank() == 1 and not heard.is_set():
                    time.sleep(0.01)
                pipe.clip_grad_norm_(1.0)
                if kind == "asks" and pipe.stopping:
                    assert len(pipe.state_dict()) == 6  # whole, so that it can be saved
                    break
        except SystemExit as exit:
            say(f"{pipe.steps} steps, exit {exit.code}")
            raise
        say(f"{pipe.steps} steps")
    assert signal.getsignal(signal.SIGTERM) is (mine if kind == "own" else signal.SIG_DFL)
    dist.barrier()  # rank 0 holds the store
    leave()


@pytest.mark.parametrize(
    ("kind", "to"), [("", [2]), ("asks", [0]), pytest.param("", [0, 1, 2], marks=pytest.mark.slow)]
)
def test_sigterm_ends_all_ranks_after_the_same_step(server: Server, tmp_path: Path, kind: str, to: list[int]) -> None:
    with server.crew(is_terminated, 3, kind, folder=tmp_path) as crew:
        crew.wait_for("ready")
        time.sleep(0.3)
        for rank in to:
            crew.signal(rank, signal.SIGTERM)
        assert crew.ended() == {0: 0, 1: 0, 2: 0}, crew.everything()
        steps = [re.findall(r"^(\d+) steps", crew.said(rank), re.M) for rank in range(3)]
        assert steps[0] == steps[1] == steps[2], crew.everything()
        assert len(steps[0]) == 1, crew.everything()
        if not kind:
            assert all(re.search(r"leaves after \d+ calls: rank \d received SIGTERM", crew.said(r)) for r in range(3))
        assert "Traceback" not in crew.everything(), crew.everything()


def test_a_handler_of_the_users_own_is_left_alone(server: Server, tmp_path: Path) -> None:
    with server.crew(is_terminated, 2, "own", folder=tmp_path) as crew:
        crew.wait_for("ready")
        crew.signal(1, signal.SIGTERM)
        assert crew.ended() == {0: 0, 1: 0}, crew.everything()
        assert [crew.said(rank) for rank in range(2)] == ["ready\n5 steps\n", "ready\nmy own\n5 steps\n"]


# -- the log and the ports ---------------------------------------------------------------------------------------------


def straggles(slow: str) -> None:
    logging.basicConfig(format="%(name)s %(levelname)s %(message)s", level=logging.INFO)
    layers = [Slow(0.06 if number == int(slow) else 0.004) for number in range(3)]  # whatever else the machine does
    with pipeline(nn.Sequential(*layers), microbatches=2) as pipe:
        for _ in range(32):
            pipe.step(X, Y)
    dist.barrier()  # rank 0 holds the store
    leave()


@pytest.mark.alone  # who is slow is a matter of time
@pytest.mark.parametrize("slow", [0, pytest.param(2, marks=pytest.mark.slow), pytest.param(-1, marks=pytest.mark.slow)])
def test_a_device_much_slower_than_the_others_is_named_once(server: Server, tmp_path: Path, slow: int) -> None:
    with server.crew(straggles, 3, slow, folder=tmp_path) as crew:
        assert set(crew.ended().values()) == {0}, crew.everything()
        said = [crew.said(rank) for rank in range(3)]
        if slow == -1:
            assert said == ["", "", ""]
        else:
            assert said[1:] == ["", ""]
            assert len(said[0].splitlines()) == 1, said[0]
            assert said[0].startswith(f"gapless WARNING gapless: rank {slow} (device {slow}) is slow: it was busy for")


def test_slow_is_what_takes_twice_the_time_of_the_others_for_the_same_plan() -> None:
    assert stragglers([(0.125, 1.0), (0.125, 1.0), (0.25, 2.0)]) == {2: (0.25, 0.125)}
    assert stragglers([(0.1, 1.0), (0.1, 1.0), (0.3, 1.0)]) == {}  # as planned
    assert stragglers([(0.0001, 1.0), (0.0001, 1.0), (0.0003, 3.0)]) == {}  # nobody would notice
    assert stragglers([(0.125, 1.0), (0.5, 4.0)]) == {1: (0.5, 0.125)}


def listening() -> set[str]:
    """The addresses at which this process listens."""
    files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd.isdigit() and _there(fd)]
    sockets = {name[8:-1] for name in files if name.startswith("socket:[")}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in Path(table).read_text().splitlines()[1:]:
            words = row.split()
            if words[3] == "0A" and words[9] in sockets:
                found.add(words[1])
    return found


def _there(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def listens(interface: str, address: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    before = listening()
    with pipeline() as pipe:
        pipe.step(X, Y)
        ours = listening() - before
        here = "".join(f"{int(part):02X}" for part in reversed(address.split(".")))
        assert ours
        assert {place.partition(":")[0] for place in ours} == {here}, (ours, here)
    dist.barrier()
    assert listening() <= before


def _interfaces() -> list[tuple[str, str]]:
    said = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=False).stdout
    return re.findall(r"^\d+: (\S+)\s+inet ([\d.]+)", said, re.M) or [("lo", "127.0.0.1")]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_ports_are_bound_to_the_given_interface_only(launch: Launch) -> None:
    for interface, address in _interfaces():
        launch(listens, 2, interface, address)


# -- torchrun ----------------------------------------------------------------------------------------------------------

_SCRIPT = """
import os, signal, sys
import torch, torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
import gapless

torch.set_num_threads(1)
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("pp",))
model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(mesh.size())))
pipe = gapless.Pipeline(model, mesh=mesh, microbatches=4, loss=F.mse_loss, timeout=20.0)
for step in range(100000):
    pipe.step(torch.ones(8, 6), torch.ones(8, 6))
    if step == 20 and mesh.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_under_torchrun_survivors_name_the_one_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(_SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    try:
        said, _ = process.communicate(timeout=90)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    assert re.search(rf"TransportError: rank 0 .*{PLACE}.*: rank 1 is dead", said), said


# -- for long ----------------------------------------------------------------------------------------------------------


def keeps_on(steps: str, microbatches: str) -> None:
    """Memory half way, where everything has been used, and at the end."""
    count = int(microbatches)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(dist.get_world_size())))
    x, y = torch.randn(count, 6), torch.randn(count, 6)
    with pipeline(model, microbatches=count, timeout=120.0) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
        sizes = []
        for _ in range(int(steps)):
            pipe.step(x, y)
            optimizer.step()
            optimizer.zero_grad()
            sizes.append(resident())
    grown = sizes[-1] - sizes[len(sizes) // 2]
    say(f"{pipe.steps} steps, grown by {grown >> 10} KiB of {sizes[-1] >> 20} MiB")
    assert grown < 4 << 20, sizes[:: len(sizes) // 10]


def test_many_ranks_and_microbatches_run_without_a_hang_and_with_flat_memory(launch: Launch) -> None:
    launch(keeps_on, 6, "30", "12", timeout=100)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_sixteen_ranks_with_64_microbatches_run_500_steps_with_flat_memory(server: Server, tmp_path: Path) -> None:
    with server.crew(keeps_on, 16, 500, 64, folder=tmp_path) as crew:
        assert set(crew.ended(seconds=3500).values()) == {0}, crew.everything()
        print(crew.everything())


# -- the ring ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9])
def test_the_pairs_of_a_ring_can_be_connected_one_after_another(count: int) -> None:
    ranks = list(range(10, 10 + count))
    todo = {rank: pairs(ranks, rank) for rank in ranks}
    assert sum(map(len, todo.values())) == (0 if count == 1 else 2 if count == 2 else 2 * count)
    rounds = 0
    while any(todo.values()):
        heads = [waiting[0] for waiting in todo.values() if waiting]
        ready = {pair for pair in heads if heads.count(pair) == 2}
        assert ready, "all wait in a circle"
        todo = {rank: [pair for pair in waiting if pair not in ready] for rank, waiting in todo.items()}
        rounds += 1
    assert rounds <= 3
