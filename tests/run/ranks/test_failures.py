"""What goes wrong on one rank: it says what and where, the others say whom they waited for, and nobody hangs."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gapless
from gapless.errors import ConfigError, TransportError
from tests.run.forked import Launch


class Fails(torch.autograd.Function):
    """Raises in the forward or in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, when: str) -> Tensor:
        ctx.when = when
        if when == "forward":
            raise ValueError("the user's own")
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.when == "backward":
            raise ValueError("the user's own")
        return grads[0], None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.when = ""
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = Fails.apply(self.linear(x), self.when if self.calls == 3 else "")  # type: ignore[no-untyped-call]
        return y


def _two_steps(pipe: gapless.Pipeline) -> None:
    pipe.step(X, Y)
    pipe.step(X, Y)


def pipeline(**options: Any) -> gapless.Pipeline:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    layers = nn.Sequential(*(Layer() for _ in range(dist.get_world_size())))
    asked: dict[str, Any] = {"microbatches": 4, "loss": F.mse_loss, "timeout": 20.0, **options}
    return gapless.Pipeline(layers, mesh=mesh, **asked)


X, Y = torch.randn(8, 4), torch.randn(8, 4)


def one_raises() -> None:
    """Each rank in turn, forward and backward."""
    rank = dist.get_rank()
    for when in ("forward", "backward"):
        for guilty in range(dist.get_world_size()):
            with pipeline() as pipe:
                layer: Any = pipe.module()[rank]  # type: ignore[index]
                layer.when = when if rank == guilty else ""
                start = time.monotonic()
                if rank == guilty:
                    with pytest.raises(ValueError, match="the user's own") as caught:
                        pipe.step(X, Y)
                    assert f"raised on device {rank} (cpu), stage {rank}, action {rank}" in caught.value.__notes__[0]
                else:
                    failed = (
                        rf"^rank {rank} \(device {rank}\) .*: rank {guilty} failed on device {guilty} .*action {guilty}"
                    )
                    with pytest.raises(TransportError, match=failed):
                        _two_steps(pipe)  # this rank may have done its part of the first when the other one failed
                assert time.monotonic() - start < 30
                with pytest.raises(TransportError, match="closed the connections between the ranks"):
                    pipe.step(X, Y)
            dist.barrier()
            with pipeline() as pipe:  # a new one works
                assert pipe.step(X, Y).loss is not None
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("gapless")]


def test_an_exception_is_told_where_it_was_raised_and_ends_the_wait_of_all_others(launch: Launch) -> None:
    launch(one_raises, 3)


def one_is_killed() -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    pipe = pipeline()
    pipe.step(X, Y)
    dist.barrier()
    if rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(TransportError, match=rf"^rank {rank} .*stage \d.*: rank {last} is dead"):
        pipe.step(X, Y)
    assert time.monotonic() - start < 30
    pipe.close()
    print(f"rank {rank} noticed", flush=True)
    os._exit(0)  # torch's own group waits for the one that is gone


def test_a_rank_that_is_killed_is_named_by_those_that_waited_for_it(launch: Launch) -> None:
    said = launch(one_is_killed, 3, fails=True)
    assert "rank 0 noticed" in said
    assert "rank 1 noticed" in said


def what_can_not_cross() -> None:
    """An object that only the sender could make: said there, and no rank waits for it."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))

    class Odd:
        pass

    class Hand(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"x": x, "odd": Odd()}

    class Take(nn.Module):
        def forward(self, state: dict[str, Any]) -> Tensor:
            x: Tensor = state["x"]
            return x

    with gapless.Pipeline(
        nn.Sequential(Hand(), Take()), mesh=mesh, microbatches=2, loss=F.mse_loss, partition=[1, 1], timeout=20.0
    ) as pipe:
        with pytest.raises(gapless.GaplessError) as caught:
            pipe.step(X.requires_grad_(), Y)
        assert isinstance(caught.value, TransportError if rank else ConfigError)
        if not rank:
            assert "a Odd can't cross between processes" in str(caught.value)


def interrupted() -> None:
    """Ctrl-C reaches the main thread, whatever the device waits for."""
    rank = dist.get_rank()
    pipe = pipeline()
    pipe.step(X, Y)
    dist.barrier()
    start = time.monotonic()
    if rank:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            pipe.step(X, Y)
    else:
        time.sleep(1.0)  # never comes
        with pytest.raises(TransportError):
            pipe.step(X, Y)
    assert time.monotonic() - start < 30
    pipe.close()


def refused() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    unnamed = init_device_mesh("cpu", (2,))
    other = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "ep"))
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    asked: dict[str, Any] = {"microbatches": 2, "loss": F.mse_loss}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "give one of them, as devices=2"),
        ({"devices": 2, "mesh": mesh}, "both are given"),
        ({"mesh": 2}, "mesh is 2, but it must be"),
        ({"mesh": unnamed}, "without names"),
        ({"mesh": other}, "'pp', 'ep'"),
    ]
    for options, message in wrong:
        with pytest.raises(ConfigError, match=message):
            gapless.Pipeline(layers, **options, **asked)
    dist.barrier()


def several() -> None:
    for each in (refused, what_can_not_cross, interrupted):
        each()
        dist.barrier()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("gapless")]


def test_what_is_refused_or_interrupted_ends_on_every_rank(launch: Launch) -> None:
    launch(several, 2)


def left_open() -> None:
    """A pipeline that is dropped, or still there when the program ends."""
    pipeline().step(X, Y)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("gapless")]
    mine: Callable[..., Any] = pipeline().step
    mine(X, Y)
    sys.modules["__main__"].__dict__["kept"] = mine


def test_a_pipeline_that_nobody_closes_ends_with_the_program(launch: Launch) -> None:
    launch(left_open, 2)
