"""What ranks tell each other about an error, whatever its text is, and whose fault it is."""

import json
import os
import re
import signal
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gapless.errors import TransportError
from gapless.run.ranks import many_processes as ranks_module
from gapless.run.ranks.watch import watch
from gapless.run.ranks.watch.blame import in_short, is_lost, may_be_lost
from gapless.run.ranks.watch.ring import encoded
from tests.pipelines import Do, alive
from tests.run.crew import Server, leave
from tests.run.forked import Launch
from tests.run.ranks.watch.test_watch import X, Y, pipeline, say


class SilentError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


LongError = type("E" + 3000 * "x", (Exception,), {})

ERRORS: list[Exception] = [
    ValueError("half a pair: \ud800"),
    ValueError(5000 * "\U0001f600"),
    ValueError(1000 * "\x00"),
    LongError("a long name"),
    SilentError(),
    RuntimeError("gloo is an octopus"),
    RuntimeError("NCCL error: said the user"),
    RuntimeError("Connection closed by my own server"),
]


@pytest.mark.parametrize("error", ERRORS, ids=range(len(ERRORS)))
def test_any_text_fits_into_a_message(error: Exception) -> None:
    """Half a surrogate pair could not be encoded, and what was cut off after 2048 bytes could not be read."""
    short = in_short(error)
    assert short.startswith(type(error).__name__[:20])
    short.encode()
    for words in ({"news": {"kind": "raised", "rank": 3, "text": short}}, {"bye": str(error.args)}, {"at": 3000 * "é"}):
        data = encoded(words)
        assert len(data) <= 2048
        assert json.loads(data).keys() == words.keys()


def test_whose_fault_an_error_is() -> None:
    """By where it was raised: a user's error may say anything."""
    for error in ERRORS:
        with pytest.raises(type(error)) as caught:
            raise error
        assert not is_lost(caught.value)
        assert may_be_lost(caught.value) == isinstance(error, RuntimeError)


def raises(number: int) -> None:
    """A layer of rank 1 raises in the second step; rank 0 tells what it heard."""
    armed = [False]

    def fail(x: Tensor) -> Tensor:
        if armed[0]:
            raise ERRORS[number]
        return x

    model = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), Do(fail)]
    say(f"=== {number}")
    with pipeline(model) as pipe:
        pipe.step(X, Y)
        armed[0] = dist.get_rank() == 1
        try:
            for _ in range(2):
                pipe.step(X, Y)
            say("did not raise")
        except Exception:
            say(traceback.format_exc().encode(errors="backslashreplace").decode())


def raises_all() -> None:
    for number in range(len(ERRORS)):
        raises(number)
        dist.barrier()
    leave()


def test_an_error_of_any_text_is_shown_where_it_was_raised_and_told_to_all(server: Server, tmp_path: Path) -> None:
    """One that spoke of Gloo was taken for a lost connection, and its traceback was dropped."""
    with server.crew(raises_all, 2, folder=tmp_path) as crew:
        assert crew.ended(seconds=100) == {0: 0, 1: 0}, crew.everything()
        said = [dict(re.findall(r"=== (\d+)\n((?:(?!===).*\n)*)", crew.said(rank))) for rank in range(2)]
        for number, error in enumerate(ERRORS):
            name = type(error).__name__
            assert "in fail" in said[1][str(number)], crew.everything()
            assert "TransportError" not in said[1][str(number)], crew.everything()
            told = re.search(r"TransportError: .*rank 1 failed on device 1 .*, action 1F\d: (.*)", said[0][str(number)])
            assert told is not None, crew.everything()
            assert told[1].startswith(name[:200]), crew.everything()


# -- places ------------------------------------------------------------------------------------------------------------


def dies_after_it_was_made() -> None:
    pipe = pipeline()
    say("ready")
    if dist.get_rank() == 1:
        time.sleep(60)
    pipe.step(X, Y)


def test_a_place_is_not_older_than_the_pipeline(server: Server, tmp_path: Path) -> None:
    """Until the first sign of life came, a second later, a rank was said to be making its pipeline."""
    with server.crew(dies_after_it_was_made, 2, folder=tmp_path) as crew:
        crew.wait_for("ready")
        crew.signal(1, signal.SIGKILL)
        assert crew.ended([0]) == {0: 1}, crew.everything()
        assert re.search(r"rank 1 is dead: .*, it was before its first step", crew.said(0)), crew.said(0)


# -- while it is made --------------------------------------------------------------------------------------------------


def can_not_connect() -> None:
    """Something fails on rank 1 after its watch has begun: no thread of it is left to say that all is well."""
    watch._GRACE = 2.0
    if dist.get_rank() == 1:

        def fail(*_: object) -> None:
            raise OSError("no ports are left")

        setattr(ranks_module, "make_groups", fail)  # noqa: B010
    try:
        pipeline()
    except OSError as error:
        say(f"refused: {error}")
        assert not alive(), alive()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        time.sleep(1.0)
        os._exit(3)


def test_a_rank_that_can_not_connect_leaves_no_sign_of_life(server: Server, tmp_path: Path) -> None:
    with server.crew(can_not_connect, 2, folder=tmp_path) as crew:
        statuses = crew.ended()
        assert statuses[1] == 3, crew.everything()
        assert statuses[0] == 1, crew.everything()
        assert "refused: no ports are left" in crew.said(1)
        assert "rank 1 failed making its pipeline: OSError: no ports are left" in crew.said(0), crew.everything()


# -- read, not run -----------------------------------------------------------------------------------------------------


def evaluates_first() -> None:
    with pipeline() as pipe:
        pipe.evaluate(X, Y)
        pipe.step(X, Y)
        planned = pipe._world._pace.planned  # type: ignore[attr-defined]
    with pipeline() as pipe:
        pipe.step(X, Y)
        assert planned == pipe._world._pace.planned  # type: ignore[attr-defined]
        assert list(planned) == [4]


def test_an_evaluation_before_the_first_step_does_not_stand_for_its_work(launch: Launch) -> None:
    launch(evaluates_first, 2)


class Counting(nn.Module):
    """Makes a new buffer in every forward, as caches do, so that its old memory is another tensor's soon."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.seen: Tensor = nn.Buffer(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.seen = self.seen + 1
        return y


def makes_buffers() -> None:
    model = nn.Sequential(Counting(), Counting())
    with pipeline(model) as pipe:
        for step in range(1, 4):
            pipe.step(X, Y)
            state = pipe.state_dict()
            for number in range(2):
                assert torch.equal(state[f"{number}.seen"], torch.full((6,), 4.0 * step)), (step, state)
            homes = pipe._world._homes  # type: ignore[attr-defined]
            assert len(homes._buffers) == 2


def test_new_buffers_are_found_and_old_ones_let_go(launch: Launch) -> None:
    """Their places were kept by numbers of tensors that nobody held."""
    launch(makes_buffers, 2)


def test_a_lost_connection_is_one_of_gapless_own() -> None:
    assert not is_lost(TransportError("gloo"))
    assert not may_be_lost(TransportError("gloo"))
    assert may_be_lost(dist.DistBackendError("a user's own group"))
