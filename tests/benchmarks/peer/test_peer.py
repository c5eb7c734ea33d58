"""The peer runs the same layers in processes of its own, and none of them outlives the benchmark."""

import re
import signal
import subprocess
import sys
import time
from functools import partial
from os import kill

import pytest
import torch

from benchmarks.peer.contest import Contest
from benchmarks.peer.peer import Peer
from benchmarks.runner.rounds import take_turns
from gapless.errors import TransportError
from gapless.schedule.recipes import make_schedule
from gapless.schedule.verify import verify
from tests.benchmarks.processes import alive, below, needs_proc, until
from tests.programs import Programs

pytestmark = needs_proc
EMULATED = Contest(devices=2, microbatches=5, kind="emulated", seconds=0.001)


def test_the_peer_says_what_it_runs_and_what_it_refuses_and_leaves_no_process(server_of_ranks: None) -> None:
    before = below()
    runs = ["1f1b", "zb-v"] if torch.__version__ >= "2.13" else ["1f1b"]  # older ones can't split a custom function
    with Peer(EMULATED, [*runs, "interleaved"]) as peer:
        started = below() - before
        assert len(started) == 2  # its ranks
        assert peer.refused.keys() == {"interleaved"}
        assert "multiple of the number of rounds" in peer.refused["interleaved"]
        for name in runs:
            assert peer.schedules[name].rows == make_schedule(name, devices=2, microbatches=5).rows
            assert peer.step(name, times=2) > 0
        assert all(verify(schedule).ok for schedule in peer.schedules.values())
        assert until(lambda: _sleep(started))  # while others are measured
    assert until(lambda: not alive(started))


def _sleep(processes: set[int]) -> bool:
    used = _ticks(processes)
    time.sleep(0.5)
    return _ticks(processes) - used <= 2


def _ticks(processes: set[int]) -> int:
    """The processor time they have used, in hundredths of a second."""
    total = 0
    for process in processes:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total


def test_a_schedule_that_fails_is_left_out_with_the_first_cause_and_the_others_go_on(server_of_ranks: None) -> None:
    """A benchmark of minutes ended because one schedule of torch's failed, with what the last rank noticed of it."""
    before = below()
    with Peer(EMULATED, ["gpipe", "2f2b", "1f1b"]) as peer:
        assert peer.refused.keys() == {"2f2b"}
        assert re.fullmatch("it failed: rank [01]: KeyError: '2f2b'", peer.refused["2f2b"])
        first = below() - before
        kill(max(first), signal.SIGKILL)
        contestants = {name: partial(peer.step, name) for name in ("gpipe", "1f1b")}
        assert take_turns(contestants, 1).keys() == {"gpipe"}
        assert peer.refused["1f1b"] == "it failed: rank 1 ended without a word"  # rank 0 only lost its connection
        assert peer.schedules.keys() == {"gpipe"}
        second = below() - before
        assert not first & second
        kill(max(second), signal.SIGKILL)
        assert take_turns({"gpipe": partial(peer.step, "gpipe")}, 1) == {}  # there is nobody left, and no error
    assert until(lambda: not alive(first | second))


def test_a_schedule_of_ours_that_fails_is_an_error(server_of_ranks: None) -> None:
    with (
        pytest.raises(TransportError, match=r"gapless on ranks failed with 2f2b: rank [01]: .*'2f2b'"),
        Peer(EMULATED, ["2f2b"], "gapless"),
    ):
        pass


@pytest.mark.slow
def test_a_benchmark_that_is_killed_takes_its_peer_along() -> None:
    program = (
        "import time\n"
        "from benchmarks.peer.contest import Contest\n"
        "from benchmarks.peer.peer import Peer\n"
        "with Peer(Contest(2, 2, 'linear', size=4), ['1f1b']):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(100)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        started = below(process.pid)
        assert len(started) == 4  # its ranks, the server that forks them, and Python's tracker of resources
        process.kill()
    assert until(lambda: not alive(started)), alive(started)


def test_ctrl_c_stops_a_benchmark_with_all_its_processes(programs: Programs) -> None:
    words = ["emulated", "-K", "2", "-M", "2", "--milliseconds", "1", "--rounds", "100000", "--schedules", "1f1b"]
    with programs.start("benchmarks", *words) as program:
        assert until(lambda: len(below(program.pid)) == 4)
        started = below(program.pid)
        time.sleep(0.5)
        program.send_signal(signal.SIGINT)
        assert program.ended(30.0) == (130, "", "gapless: stopped\n")
    assert until(lambda: not alive(started))
