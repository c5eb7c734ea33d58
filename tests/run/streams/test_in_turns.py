"""Stages with different numbers of replicas, which take turns in the minibatches of one loader: the weights of the
formulas, to the bit, wherever a stream is interrupted.

Processes are expensive to start, so each launch runs many settings, one after another.
"""

import copy
import itertools
import random
import signal
from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

import gapless
from gapless.errors import ConfigError, GaplessError, TransportError
from tests.run.forked import Launch
from tests.run.streams import reference
from tests.run.streams.test_rank_runner import TRACES, before_ranks, follow, pipeline  # noqa: F401
from tests.run.streams.test_stream import SEED, adam, batches, failing, make, momentum, same, slower
from tests.run.streams.test_stream_traced import net


def stage_of(rank: int, replicas: Sequence[int]) -> int:
    return next(stage for stage in range(len(replicas)) if rank < sum(replicas[: stage + 1]))


def mine(pipe: gapless.Pipeline, replicas: Sequence[int], known: reference.Trained, counts: Sequence[int]) -> bool:
    """The weights of this rank's stage are those after so many updates."""
    stage = stage_of(dist.get_rank(), replicas)
    return same(pipe.parameters(), known.history[stage][counts[stage]])


def by_formula(
    pipe: gapless.Pipeline, model: nn.Module, data: Sequence[Any], replicas: Sequence[int], **how: Any
) -> Any:
    return reference.in_turns(model, pipe.partition, replicas, data, seed=SEED, **{"optimizer": momentum, **how})


def check(
    replicas: Sequence[int],
    name: str,
    optimizer: Any,
    count: int,
    *,
    drains: Sequence[int] = (),
    ends: Sequence[int] = (),
    split: bool = False,
    remat: Any = "none",
    **how: Any,
) -> None:
    """`drains`: after these minibatches were fed; `ends`: the stream ends there, and another run goes on."""
    data, found = batches(count), list[Tensor]()
    with pipeline(make(name), replicas=replicas, remat=remat) as pipe:
        known, counts = by_formula(pipe, make(name), data, replicas, optimizer=optimizer, ends=ends, **how)
        stream = pipe.stream(
            optimizer=optimizer,
            scheduler=how.get("scheduler"),
            clip=how.get("clip"),
            split=split,
            correction="spectrain" if how.get("ahead") else None,
        )
        for at in sorted({*drains, *ends, count}):
            for result in stream.run(data[len(found) : at]):
                assert result.minibatch == len(found)
                found.append(result.loss)
            if at in ends or at == count:
                stream.__exit__(None, None, None)
            else:
                stream.drain()
                assert mine(pipe, replicas, known, counts[at]), (replicas, name, at)
                pipe.evaluate(*data[0])
            assert stream.minibatches == at
        assert same(found, known.losses), (replicas, name)
        assert mine(pipe, replicas, known, counts[-1]), (replicas, name)
        state = pipe.state_dict()
        whole = [each for stage, at in zip(known.history, counts[-1], strict=True) for each in stage[at]]
        assert same((state[name] for name, _ in make(name).named_parameters()), whole)


def settings() -> None:
    check((3, 1), "dropout", momentum, 10, drains=(1, 5), ends=(8,), split=True)
    check((1, 2, 1), "dropout", adam, 7, drains=(4,), scheduler=slower, clip=0.5, ahead=True)
    check((3, 1), "sometimes", momentum, 8, drains=(5,))
    check((1, 3), "frozen", adam, 5)
    saved((1, 3), 7, 10)
    traced((1, 3))
    forward_fails((3, 1), 1, 2)
    an_update_fails()
    interrupted((2, 2), 1)
    different_minibatches()
    refused()


def saved(replicas: Sequence[int], at: int, count: int) -> None:
    """Another pipeline goes on from the state of a stream, in the middle of a group."""
    data = batches(count)
    with pipeline(make("dropout"), replicas=replicas) as pipe, pipe.stream(optimizer=adam, scheduler=slower) as stream:
        list(stream.run(data[:at]))
        state, own = stream.state_dict(), copy.deepcopy(stream.state_dict(whole=False))
        weights = pipe.state_dict()
        assert (state["minibatches"], state["replicas"]) == (at, list(replicas))
        assert [len(stage["waiting"]) for stage in state["stages"].values()] == [at % count for count in replicas]
    for each in (state, own):
        with pipeline(make("dropout"), replicas=replicas) as pipe:
            known, counts = by_formula(pipe, make("dropout"), data, replicas, optimizer=adam, scheduler=slower)
            pipe.load_state_dict(weights)
            with pipe.stream(optimizer=adam, scheduler=slower) as stream:
                stream.load_state_dict(each)
                assert mine(pipe, replicas, known, counts[at])
                assert [result.minibatch for result in stream.run(data[at:])] == list(range(at, count))
            assert mine(pipe, replicas, known, counts[-1])


def traced(replicas: Sequence[int]) -> None:
    """All replicas of a stage have the same trace, and hold its weights alike."""
    TRACES.use()
    data = batches(7)
    with pipeline(net(0.2), replicas=replicas, example=data[0][0]) as pipe:
        with pipe.stream(optimizer=momentum) as stream:
            names = [each["parameters"] for each in stream.state_dict()["stages"].values()]
            known, counts = reference.in_turns(net(0.2), names, replicas, data, optimizer=momentum, seed=SEED)
            found = [result.loss for result in stream.run(data)]
        assert same(found, known.losses)
        state = pipe.state_dict()
        for stage, versions, at in zip(names, known.history, counts[-1], strict=True):
            assert same((state[name] for name in stage), versions[at])


def forward_fails(replicas: Sequence[int], guilty: int, at: int) -> None:
    """On one replica, in its own minibatch `at`: those before it are finished, and another run goes on."""
    rank, data = dist.get_rank(), batches(14)
    stage = stage_of(guilty, replicas)
    place = guilty - sum(replicas[:stage])
    minibatch = at * replicas[stage] + place
    model, plain = failing(0 if stage == 0 else 7, forward_at=at if rank == guilty else -1)
    with pipeline(model, replicas=replicas) as pipe:
        known, counts = by_formula(pipe, plain, data, replicas)
        stream = pipe.stream(optimizer=momentum)
        with pytest.raises(ValueError if rank == guilty else TransportError) as failed:
            list(stream.run(data))
        words = str(failed.value) if rank != guilty else failed.value.__notes__[-1]
        assert f"the model is at minibatch {minibatch}, and so are all stages" in words
        assert stream.minibatches == minibatch
        assert mine(pipe, replicas, known, counts[minibatch])
        with stream:
            assert len(list(stream.run(data[minibatch:]))) == 14 - minibatch
        assert mine(pipe, replicas, known, counts[-1])


def an_update_fails() -> None:
    """A gradient is not finite: no update is made with it, the stages differ, and no state is given away."""
    data = batches(9)
    data[4] = (data[4][0] * float("inf"), data[4][1])
    with pipeline(make("linear"), replicas=(3, 1)) as pipe:
        stream = pipe.stream(optimizer=momentum)
        with pytest.raises(GaplessError, match="not finite") as failed:
            list(stream.run(data))
        assert "minibatch 4" in str(failed.value)
        with pytest.raises(GaplessError, match=r"stage 0 on rank 0 at 5.*stage 1 on rank 3 at 4"):
            pipe.state_dict()


def interrupted(replicas: Sequence[int], guilty: int) -> None:
    """Ctrl-C on one rank: all of them stop at the same minibatch, in the middle of a group perhaps, and go on."""
    rank, data = dist.get_rank(), batches(30)
    with pipeline(make("linear"), replicas=replicas) as pipe:
        known, counts = by_formula(pipe, make("linear"), data, replicas)
        stream = pipe.stream(optimizer=momentum)
        with pytest.raises(KeyboardInterrupt if rank == guilty else TransportError), stream:
            follow(stream, data, 8 if rank == guilty else -1, lambda: signal.raise_signal(signal.SIGINT))
        at = stream.minibatches
        assert 8 < at < 25
        assert mine(pipe, replicas, known, counts[at])
        stream.drain()
        list(stream.run(data[at:]))
        stream.drain()
        assert mine(pipe, replicas, known, counts[30])


def different_minibatches() -> None:
    rank = dist.get_rank()
    with pipeline(make("linear"), replicas=(3, 1)) as pipe:
        stream = pipe.stream(optimizer=momentum)
        told = "rank 2 has ended the stream after 6 .* after 9.* at minibatch 8"
        with pytest.raises(ConfigError, match=told), stream:
            list(stream.run(batches(6 if rank == 2 else 9)))
        with stream:
            assert len(list(stream.run(batches(2)))) == 2
        data = batches(12)
        if rank == 1:
            data[4] = data[5]
        told = "got different batches in minibatch 4 of a stream: rank 1, which has the first stage, .* rank 3"
        other = pipe.stream(optimizer=momentum)
        with pytest.raises(ConfigError if rank == 3 else TransportError, match=told):
            list(other.run(data))
        assert other.minibatches == 4


def refused() -> None:
    with pytest.raises(ConfigError, match="replicas= is for schedule='pipedream'"):
        pipeline(make("linear"), replicas=(3, 1), schedule="1f1b")
    with pytest.raises(GaplessError, match="replicas 2,1 use 3 devices, but there are 4"):
        pipeline(make("linear"), replicas=(2, 1))
    with pipeline(make("linear"), replicas=(3, 1)) as pipe:
        assert "stage 0 on devices 0 to 2 (cpu each)" in repr(pipe)
        with pytest.raises(ConfigError, match="vertical=True gives a minibatch one version"):
            pipe.stream(optimizer=momentum, vertical=True)
        stream = pipe.stream(optimizer=momentum)
        list(stream.run(batches(4)))
        first = stage_of(dist.get_rank(), (3, 1)) == 0
        with pytest.raises(
            ConfigError, match="wait for the rest" if first else "rank 0 can't continue .* wait for the"
        ):
            stream.state_dict(versions=False)
        with stream:
            pass
        assert stream.minibatches == stream.state_dict(versions=False)["minibatches"] == 4


def test_replicas_of_single_stages_have_the_weights_of_the_formulas(launch: Launch) -> None:
    launch(settings, 4)


def exhaustively(seed: str) -> None:
    """Random replicas, models and optimizers, interrupted at random minibatches by a drain, an end, or a state that
    another pipeline goes on from.
    """
    drawn, ranks = random.Random(int(seed)), dist.get_world_size()
    for _ in range(12):
        cuts = sorted(drawn.sample(range(1, ranks), drawn.randint(0, min(3, ranks - 1))))
        replicas = [after - before for before, after in itertools.pairwise([0, *cuts, ranks])]
        if max(replicas) == 1:
            continue
        count = drawn.randint(1, 17)
        points = drawn.sample(range(1, count + 1), drawn.randint(0, min(4, count)))
        ends = [each for each in points if drawn.random() < 0.3]
        check(
            replicas,
            drawn.choice(["linear", "blocks", "dropout"]),
            drawn.choice([momentum, adam]),
            count,
            drains=[each for each in points if each not in ends],
            ends=ends,
            scheduler=drawn.choice([None, slower]),
            clip=drawn.choice([None, 0.3]),
            ahead=drawn.random() < 0.3,
            split=drawn.random() < 0.5,
            remat=drawn.choice(["none", "stage"]),
        )
        saved(replicas, drawn.randint(1, 9), 10)
        guilty = drawn.randrange(ranks)
        stage = stage_of(guilty, replicas)
        if stage in (0, len(replicas) - 1):
            forward_fails(replicas, guilty, drawn.randint(0, 12 // replicas[stage] - 1))
        interrupted(replicas, guilty)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ranks", [3, 4, 5])
def test_any_replicas_have_the_weights_of_the_formulas(launch: Launch, ranks: int, seed: int) -> None:
    launch(exhaustively, ranks, str(seed), timeout=600.0)
