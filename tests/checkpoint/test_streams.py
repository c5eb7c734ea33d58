"""Asynchronous training that goes on from a checkpoint has the bits of training that was never saved."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gapless
from gapless.checkpoint import Checkpoints
from gapless.errors import CheckpointError
from gapless.run.streams.stream import Stream
from tests.run.forked import Launch

COUNT = 5
KINDS = {"stashing": ("pipedream", False), "vertical": ("pipedream", True), "2bw": ("2bw", False)}


@contextmanager
def stream(kind: str = "stashing", model: nn.Module | None = None, **options: Any) -> Iterator[tuple[Any, Stream]]:
    torch.manual_seed(1)
    made = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2)) for _ in range(4)))
    schedule, vertical = KINDS[kind]
    with gapless.Pipeline(
        made if model is None else model,
        **{
            "devices": 2,
            "schedule": schedule,
            "microbatches": 2 if kind == "2bw" else 1,
            "loss": F.mse_loss,
            **options,
        },
    ) as pipe:
        yield pipe, pipe.stream(optimizer=adam, vertical=vertical, scheduler=halving)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 7], 0.5)


def data(first: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(2 * COUNT)][first : first + COUNT]


def weights(pipe: gapless.Pipeline) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in pipe.named_parameters()}


def uninterrupted(kind: str) -> dict[str, Tensor]:
    with stream(kind) as (pipe, each):
        for first in (0, COUNT):
            list(each.run(data(first)))
        each.drain()
        return weights(pipe)


def saved(folder: Path, kind: str, **options: Any) -> None:
    with stream(kind, **options) as (_, each):
        list(each.run(data(0)))
        each.save(folder, {"epoch": 1})


def resumes(folder: Path, kind: str, **options: Any) -> None:
    with stream(kind, **options) as (pipe, each):
        assert each.load(folder) == {"epoch": 1}
        assert each.minibatches == COUNT
        list(each.run(data(COUNT)))
        each.drain()
        whole = uninterrupted(kind)
        assert all(torch.equal(value, whole[name]) for name, value in weights(pipe).items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_goes_on_from_a_checkpoint_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    saved(tmp_path / "a", kind)
    resumes(tmp_path / "a", kind)


def on_ranks(kind: str, ours: str, theirs: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    saved(Path(ours), kind, devices=None, mesh=mesh)
    for folder in (ours, theirs):
        resumes(Path(folder), kind, devices=None, mesh=mesh)


def test_streams_on_ranks_and_in_one_process_go_on_from_each_other(launch: Launch, tmp_path: Path) -> None:
    saved(tmp_path / "theirs", "2bw")
    launch(on_ranks, 2, "2bw", str(tmp_path / "ours"), str(tmp_path / "theirs"))
    resumes(tmp_path / "ours", "2bw")


def test_a_stream_with_other_stages_starts_anew_from_the_newest_weights(tmp_path: Path) -> None:
    saved(tmp_path / "a", "stashing")
    with stream(devices=4) as (pipe, each):
        before = weights(pipe)
        with pytest.raises(CheckpointError, match=r"versions for stashing with 2 stages.*load it with versions=False"):
            each.load(tmp_path / "a")
        assert all(torch.equal(value, before[name]) for name, value in weights(pipe).items())
        each.load(tmp_path / "a", versions=False)
        assert each.minibatches == COUNT
        list(each.run(data(COUNT)))
    with (
        stream(devices=4) as (pipe, each),
        pytest.raises(CheckpointError, match=r"saved by a stream, not by a pipeline"),
    ):
        pipe.load(tmp_path / "a")


def test_the_checkpoints_of_a_stream_are_kept_like_others(tmp_path: Path) -> None:
    with stream() as (_, each), Checkpoints(tmp_path / "run", each, keep=2) as run:
        for first in (0, COUNT):
            list(each.run(data(first)))
            run.save(extra={"first": first})
        run.wait()
        assert [entry.step for entry in run.saved] == [COUNT, 2 * COUNT]
        with pytest.raises(CheckpointError, match="a stream has its own optimizers"):
            run.save(optimizer=torch.optim.SGD([torch.zeros(1)], lr=1.0))
    with stream() as (_, each), Checkpoints(tmp_path / "run", each) as run:
        assert run.load() == {"first": COUNT}
        assert each.minibatches == 2 * COUNT
