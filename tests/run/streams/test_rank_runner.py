"""A stream under ranks has the weights of the formulas too, and stops in order, whatever happens on one of them.

Processes are expensive to start, so each launch runs many settings, one after another.
"""

import functools
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gapless
from benchmarks.peer.contest import Contest
from benchmarks.peer.gapless_sides import prepare_gapless
from benchmarks.runner.rounds import Span
from gapless.errors import ConfigError, GaplessError, TransportError
from tests.pipelines import alive
from tests.run.forked import Launch
from tests.run.streams import reference
from tests.run.streams.test_stream import (
    MICROBATCHES,
    RULES,
    SEED,
    adam,
    assert_follows,
    batches,
    by_formula,
    failing,
    make,
    momentum,
    same,
    slower,
)  # fmt: skip
from tests.run.streams.test_stream_state import Odd
from tests.run.streams.test_stream_traced import X, net
from tests.traced_once import Traces

TRACES = Traces()


@functools.cache
def before_ranks() -> None:
    """In training and in evaluation."""
    TRACES.trace(model := net(0.2), X)
    with torch.no_grad():
        TRACES.trace(model.eval(), X)


def pipeline(model: nn.Module, kind: str = "stashing", copies: int = 1, **options: Any) -> gapless.Pipeline:
    """As many of it as asked for, each on its share of the ranks."""
    dims = (copies, dist.get_world_size() // copies)
    mesh = init_device_mesh("cpu", dims[copies == 1 :], mesh_dim_names=("dp", "pp")[copies == 1 :])
    asked: dict[str, Any] = {"microbatches": MICROBATCHES[kind], "loss": F.mse_loss, "seed": SEED, "timeout": 30.0}
    return gapless.Pipeline(model, mesh=mesh, **{"schedule": RULES[kind][0], **asked, **options})


def mine(pipe: gapless.Pipeline, known: reference.Trained, at: int) -> bool:
    """The weights of this rank's stage are those of that version."""
    return same(pipe.parameters(), known.history[dist.get_rank()][at])


def check(
    kind: str, name: str, optimizer: Any, *, count: int = 9, remat: Any = "none", transport: Any = "auto", **how: Any
) -> None:
    plain, rank = make(name), dist.get_rank()
    with pipeline(make(name), kind, remat=remat, transport=transport) as pipe:
        known = assert_follows(
            pipe, kind, plain, batches(count), stages=slice(rank, rank + 1), optimizer=optimizer, **how
        )
        state = pipe.state_dict()
        assert same((state[name] for name, _ in plain.named_parameters()), known.at(count))


def traced() -> None:
    TRACES.use()
    data = batches(9)
    with pipeline(net(0.2), example=data[0][0]) as pipe:
        with pipe.stream(optimizer=momentum, split=True) as stream:
            names = [each["parameters"] for each in stream.state_dict()["stages"].values()]
            known = reference.trained(net(0.2), names, "stashing", data, optimizer=momentum, seed=SEED)
            found = []
            for result in stream.run(data):
                found.append(result.loss)
                if result.minibatch == 4:
                    stream.drain()
                    pipe.evaluate(*data[0])
        assert same(found, known.losses)
        state = pipe.state_dict()
        assert same((state[name] for stage in names for name in stage), known.at(9))


def saved() -> None:
    """Another pipeline goes on from the state of a stream, with the bits of one that was never interrupted."""
    data = batches(9)
    with pipeline(make("dropout")) as pipe, pipe.stream(optimizer=adam, scheduler=slower) as stream:
        list(stream.run(data[:4]))
        state, weights = stream.state_dict(), pipe.state_dict()
        assert len(state["stages"]) == dist.get_world_size()
        assert list(stream.state_dict(whole=False)["stages"]) == [str(dist.get_rank())]
    with pipeline(make("dropout")) as pipe:
        known = by_formula(pipe, "stashing", make("dropout"), data, optimizer=adam, scheduler=slower)
        pipe.load_state_dict(weights)
        with pipe.stream(optimizer=adam, scheduler=slower) as stream:
            stream.load_state_dict(state)
            assert [result.minibatch for result in stream.run(data[4:])] == list(range(4, 9))
        assert mine(pipe, known, 9)


def benchmarked() -> None:
    """The contestant of `python -m benchmarks emulated --torchrun`."""
    contest = Contest(dist.get_world_size(), 4, "emulated", seconds=0.0005)
    _, run = prepare_gapless(contest, "2bw", dist.get_rank())
    spans = [run(), run()]
    dist.barrier()  # a rank that lets go of its pipeline ends those of the others
    assert all(isinstance(span, Span) and span.seconds > 3 * 4 * 0.0004 for span in spans)


def semantics() -> None:
    if dist.get_world_size() == 1:
        check("stashing", "dropout", momentum, drains=(1, 4))
        check("2bw", "blocks", adam)
        return
    check("vertical", "dropout", momentum, drains=(1, 4))
    check("2bw", "dropout", adam, scheduler=slower, clip=0.1, drains=(1, 4), remat="layer", split=True)
    check("stashing", "dropout", momentum, scheduler=slower, clip=0.1, remat="stage", drains=(0, 1, 2))
    check("stashing", "linear", adam, ahead=True, annealed_over=5, drains=(3,), transport="gloo")
    check("stashing", "linear", momentum, count=1)
    traced()
    saved()
    benchmarked()
    assert not alive()


@pytest.mark.parametrize("ranks", [1, 3])
def test_weights_are_those_of_the_formula_on_every_rank(ranks: int, launch: Launch) -> None:
    launch(semantics, ranks)


@pytest.mark.slow
def test_weights_are_those_of_the_formula_on_four_ranks(launch: Launch) -> None:
    launch(semantics, 4)


def follow(stream: Any, data: Sequence[Any], at: int, do: Callable[[], object]) -> None:
    """Something happens after the result of minibatch `at`."""
    for result in stream.run(data):
        if result.minibatch == at:
            do()


def forwards_fail() -> None:
    """On the first rank and on the last: minibatches before it are finished, and another run goes on from it."""
    rank, data = dist.get_rank(), batches(9)
    for guilty, layer in ((0, 0), (2, 7)):
        model, plain = failing(layer, forward_at=5)
        with pipeline(model) as pipe:
            known = by_formula(pipe, "stashing", plain, data)
            stream = pipe.stream(optimizer=momentum)
            expected = ValueError if rank == guilty else TransportError
            with pytest.raises(expected) as failed:
                list(stream.run(data))
            if rank == guilty:
                assert f"raised at stage {guilty}, in the forward of minibatch 5" in failed.value.__notes__[0]
                assert "the model is at minibatch 5, and so are all stages" in failed.value.__notes__[-1]
            else:
                words = (
                    f"rank {guilty} failed at stage {guilty}, in the forward of minibatch 5: ValueError: as told: the"
                )
                assert f"{words} model is at minibatch 5" in str(failed.value)
            assert stream.minibatches == 5
            assert mine(pipe, known, 5)
            with stream:
                assert len(list(stream.run(data[5:]))) == 4
            assert mine(pipe, known, 9)


def a_backward_fails() -> None:
    """Stages have made different updates then: no state is given away, until another was loaded."""
    rank = dist.get_rank()
    for guilty, layer in ((0, 0), (1, 4)):
        model, _ = failing(layer, backward_at=4)
        with pipeline(model) as pipe:
            before = pipe.state_dict()
            stream = pipe.stream(optimizer=momentum)
            with pytest.raises(ValueError if rank == guilty else TransportError) as failed:
                list(stream.run(batches(9)))
            if rank != guilty:
                assert f"rank {guilty} failed at stage {guilty}, in the backward of minibatch 4" in str(failed.value)
            counts = f"stage {guilty} at 4"
            if guilty == 0:  # others have gone on
                with pytest.raises(GaplessError, match=counts):
                    pipe.state_dict()
                with pytest.raises(GaplessError, match=counts):
                    list(stream.run(batches(1)))
            pipe.load_state_dict(before)
            with pipe.stream(optimizer=momentum) as stream:
                assert len(list(stream.run(batches(3)))) == 3
            assert not torch.equal(pipe.state_dict()["0.weight"], before["0.weight"])


def interrupted() -> None:
    """Ctrl-C on one rank drains all of them, also one that waits in the middle of the pipeline."""
    rank, data = dist.get_rank(), batches(30)
    for guilty in (1, 2):
        with pipeline(make("linear")) as pipe:
            known = by_formula(pipe, "stashing", make("linear"), data)
            stream = pipe.stream(optimizer=momentum)
            with pytest.raises(KeyboardInterrupt if rank == guilty else TransportError) as stopped, stream:
                follow(stream, data, 10 if rank == guilty else -1, lambda: signal.raise_signal(signal.SIGINT))
            if rank == guilty:
                words = stopped.value.__notes__[-1]
            else:
                words = str(stopped.value)
                assert f"rank {guilty} was interrupted" in words
            at = stream.minibatches
            assert f"the model is at minibatch {at}, and so are all stages" in words
            assert 10 < at < 20
            assert mine(pipe, known, at)
            with stream:
                assert len(list(stream.run(data[at : at + 5]))) == 5
            assert mine(pipe, known, at + 5)


def different_minibatches() -> None:
    rank = dist.get_rank()
    for guilty in (0, 2):
        with pipeline(make("linear")) as pipe:
            stream = pipe.stream(optimizer=momentum)
            told = rf"rank {guilty} has ended the stream after 6 .* after 9.* minibatch 6"
            with pytest.raises(ConfigError, match=told), stream:
                list(stream.run(batches(6 if rank == guilty else 9)))
            assert stream.minibatches == 6
            with stream:
                assert len(list(stream.run(batches(2)))) == 2


def different_batches() -> None:
    """A loader that is shuffled differently on the last rank, from the start or later: the model stays where it is."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for start in (0, 5):
        data = batches(12)
        if rank == last:
            data[start:] = data[start:][::-1]
        with pipeline(make("linear")) as pipe:
            stream = pipe.stream(optimizer=momentum)
            told = rf"got different batches in minibatch {start} of a stream: rank 0, .* and rank {last}, which has the"
            with pytest.raises(ConfigError if rank == last else TransportError, match=told):
                list(stream.run(data))
            assert stream.minibatches == start
            with stream:
                assert len(list(stream.run(batches(9)))) == 9


def a_body_raises() -> None:
    rank = dist.get_rank()
    with pipeline(make("linear")) as pipe:
        stream = pipe.stream(optimizer=momentum)
        with pytest.raises(ValueError if rank == 1 else TransportError) as failed, stream:
            follow(stream, batches(20), 3 if rank == 1 else -1, lambda: int("in the loop"))
        assert rank == 1 or "rank 1 failed: ValueError: invalid literal" in str(failed.value)
        assert pipe.evaluate(*batches(1)[0]).loss is not None


def small_and_early() -> None:
    """Few under way; a loop that is left early; a pipeline that is closed with a stream under way."""
    data = batches(20)
    with pipeline(make("linear")) as pipe:
        with pipe.stream(optimizer=momentum, in_flight=1) as stream:
            for result in stream.run(data):
                if result.minibatch == 4:
                    with pytest.raises(ConfigError, match="a stream is under way"):
                        pipe.state_dict()
                    break
        assert stream.minibatches == 6
        pipe.evaluate(*data[0])
    for taken in (1, 20):
        with pipeline(make("linear")) as pipe:
            results = pipe.stream(optimizer=momentum).run(data)
            for _ in range(taken):
                next(results)


def refused() -> None:
    rank = dist.get_rank()
    with pipeline(make("linear")) as pipe:
        with pytest.raises(ConfigError, match="vertical is false on rank 0 and true on rank 1; all ranks make"):
            pipe.stream(optimizer=momentum, vertical=rank == 1)
        with pytest.raises(ConfigError, match="ReduceLROnPlateau" if rank == 1 else "rank 1 can't continue .*ReduceLR"):
            pipe.stream(
                optimizer=momentum, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau if rank == 1 else slower
            )
        odd = pipe.stream(optimizer=momentum, scheduler=Odd if rank == 1 else slower)
        with pytest.raises(
            ConfigError, match="keeps a object" if rank == 1 else "rank 1 can't continue .*keeps a object"
        ):
            odd.state_dict()
        with pipe.stream(optimizer=momentum) as stream:
            list(stream.run(batches(3)))
        state = stream.state_dict()
        with pytest.raises(ConfigError, match="no state of a stream"):
            stream.load_state_dict({} if rank == 1 else state)
        if rank == 1:
            with torch.no_grad():
                next(iter(pipe.parameters())).mul_(2)
        with pytest.raises(
            ConfigError, match="weights were changed" if rank == 1 else "rank 1 can't continue .*changed"
        ):
            list(stream.run(batches(3)))


def faults() -> None:
    for each in (
        forwards_fail, a_backward_fails, interrupted, different_minibatches, different_batches, a_body_raises,
        small_and_early, refused,
    ):  # fmt: skip
        each()
        dist.barrier()
    assert not alive()


def test_whatever_happens_on_one_rank_all_of_them_stop_in_order(launch: Launch) -> None:
    launch(faults, 3)


def replicas_check(kind: str, name: str, optimizer: Any, count: int, drains: Sequence[int] = ()) -> None:
    """A mesh of 2 replicas x 2 stages, each with minibatches of its own."""
    replica, stage = divmod(dist.get_rank(), 2)
    with pipeline(make(name), kind, copies=2) as pipe:
        assert_follows(
            pipe, kind, make(name), batches(count), stages=slice(stage, stage + 1), replica=replica, replicas=2,
            drains=drains, optimizer=optimizer,
        )  # fmt: skip
        assert pipe.evaluate(*batches(1)[0]).loss is not None


def replicated() -> None:
    replicas_check("stashing", "dropout", momentum, 14, (1, 3))
    replicas_check("vertical", "blocks", adam, 11)
    replicas_check("2bw", "dropout", momentum, 9, (0, 1))
    a_replica_fails()


def a_replica_fails() -> None:
    """All replicas stop at the update that the forward would have gone into, made of what came."""
    replica, stage = divmod(dist.get_rank(), 2)
    model, plain = failing(4, forward_at=3 if replica == 1 else -1)
    data = batches(30)
    with pipeline(model, copies=2) as pipe:
        known = by_formula(pipe, "stashing", plain, data[:7], replicas=2)
        stream = pipe.stream(optimizer=momentum)
        with pytest.raises(ValueError if (replica, stage) == (1, 1) else TransportError) as failed:
            list(stream.run(data[replica::2]))
        if (replica, stage) != (1, 1):
            assert "rank 3 failed at stage 1, in the forward of minibatch 7: ValueError: as told" in str(failed.value)
        assert stream.minibatches == 4
        assert same(pipe.parameters(), known.history[stage][4])
        with stream:  # and they go on together
            assert len(list(stream.run(data[replica::2][4:6]))) == 2


def test_replicas_make_the_update_of_their_group_together(launch: Launch) -> None:
    launch(replicated, 4)


def killed(number: str) -> None:
    """In the middle of a stream; the others name it, and say how far each stage has come."""
    rank, guilty = dist.get_rank(), int(number)
    pipe = pipeline(make("linear"))
    stream = pipe.stream(optimizer=momentum)
    start = time.monotonic()
    with pytest.raises(TransportError, match=f"rank {guilty} is dead") as failed:
        follow(stream, batches(500), 10 if rank == guilty else -1, lambda: signal.raise_signal(signal.SIGKILL))
    assert time.monotonic() - start < 30
    assert "stream" in str(failed.value), failed.value
    stages = [rf"stage {each} at \d+" if each != guilty else rf"stage {each} at an unknown one" for each in range(3)]
    with pytest.raises(GaplessError, match=".*".join(stages)) as refused:
        pipe.state_dict()
    print(f"rank {rank}: {refused.value}", flush=True)
    pipe.close()
    os._exit(0)  # torch's own group waits for the one that is gone


def test_a_rank_that_is_killed_leaves_no_state_and_all_counts(launch: Launch) -> None:
    said = launch(killed, 3, "1", fails=True)
    lines = {line.partition(": ")[2] for line in said.splitlines() if line.startswith("rank ")}
    assert len(lines) == 1, said


def asked_to_leave() -> None:
    """SIGTERM to one rank: all drain, and leave at the same minibatch."""
    rank, data = dist.get_rank(), batches(500)
    with pipeline(make("linear")) as pipe:
        stream = pipe.stream(optimizer=momentum)
        with pytest.raises(SystemExit) as left:
            follow(stream, data, 10 if rank == 1 else -1, lambda: signal.raise_signal(signal.SIGTERM))
        assert f"the model is at minibatch {stream.minibatches}" in left.value.__notes__[-1]
        assert "0.weight" in pipe.state_dict()


def test_sigterm_drains_a_stream_on_every_rank(launch: Launch) -> None:
    launch(asked_to_leave, 2)
