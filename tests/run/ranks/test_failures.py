"""Ctrl-C on one rank, meshes that make no sense, and pipelines that nobody closes: nobody hangs."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gapless
from gapless.errors import ConfigError, TransportError
from tests.pipelines import alive
from tests.run.forked import Launch


def pipeline() -> gapless.Pipeline:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return gapless.Pipeline(layers, mesh=mesh, microbatches=4, loss=F.mse_loss, timeout=20.0)


X, Y = torch.randn(8, 4), torch.randn(8, 4)


def interrupted() -> None:
    """Ctrl-C reaches the main thread, whatever the device waits for."""
    rank = dist.get_rank()
    pipe = pipeline()
    pipe.step(X, Y)
    dist.barrier()
    if rank:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # it may come before the step
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            pipe.step(X, Y)
        dist.barrier()
    else:
        dist.barrier()  # the other has waited for a step that never came
        with pytest.raises(TransportError):
            pipe.step(X, Y)
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
    for each in (refused, interrupted):
        each()
        dist.barrier()
    assert not alive()


def test_what_is_refused_or_interrupted_ends_on_every_rank(launch: Launch) -> None:
    launch(several, 2)


def left_open() -> None:
    """A pipeline that is dropped, or still there when the program ends."""
    pipeline().step(X, Y)
    assert not alive()
    mine: Callable[..., Any] = pipeline().step
    mine(X, Y)
    sys.modules["__main__"].__dict__["kept"] = mine


def test_a_pipeline_that_nobody_closes_ends_with_the_program(launch: Launch) -> None:
    launch(left_open, 2)
