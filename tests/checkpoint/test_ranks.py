"""Checkpoints of several ranks: replicas, sharded stages, and one rank that can't."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gapless
from gapless.checkpoint import Checkpoints
from gapless.checkpoint.manifest import faults, read_manifest
from gapless.errors import CheckpointError
from tests.checkpoint.disks import CountedDisk, full
from tests.run.forked import Launch

WIDTH = 192  # of weights that are large enough to be shared out among replicas


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH + 2, bias=False), nn.Linear(WIDTH + 2, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(torch.tanh(self.up(x)))


def blocks() -> nn.Sequential:
    torch.manual_seed(8)
    return nn.Sequential(Block(), Block())


def mesh_of(second: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", second))


class Run:
    """A pipeline of two devices, and an optimizer."""

    def __init__(self, model: nn.Sequential, **options: Any) -> None:
        self.pipe = gapless.Pipeline(model, microbatches=2, loss=F.mse_loss, **options)
        self.optimizer = torch.optim.Adam(self.pipe.parameters(), lr=0.01)

    def step(self) -> None:
        torch.manual_seed(self.pipe.steps)
        batch = torch.randn(4, WIDTH)
        self.pipe.step(batch, -batch)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self) -> dict[str, Tensor]:
        """Weights and moments of this rank, all of each."""
        found = {}
        for name, each in self.pipe.named_parameters():
            kept = self.optimizer.state.get(each, {})
            for key, value in {"": each.detach(), **kept}.items():
                found[f"{name} {key}"] = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def sharded(kind: str) -> nn.Sequential:
    model = blocks()
    for block in model:
        if kind == "tp":
            parallelize_module(block, mesh_of("tp")["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        elif kind == "fsdp":
            fully_shard(block, mesh=mesh_of("dp")["dp"])
    return model


def on_four_ranks(folder: str) -> None:
    for kind in ("dp", "fsdp", "tp"):
        _goes_on(Path(folder), kind)
    _refuses(Path(folder))


def _goes_on(folder: Path, kind: str) -> None:
    mesh = mesh_of("tp" if kind == "tp" else "dp")
    first, second = Run(sharded(kind), mesh=mesh), Run(sharded(kind), mesh=mesh)
    with first.pipe, second.pipe:
        first.step()
        with Checkpoints(folder / kind, first.pipe) as run:
            run.save(first.optimizer, extra={"kind": kind})
            first.step()  # while it is written
        assert second.pipe.load(folder / kind / "latest", second.optimizer) == {"kind": kind}
        second.step()
        same(first.whole(), second.whole())
        if kind != "dp":  # what was whole is loaded in parts
            third = Run(sharded(kind), mesh=mesh)
            with third.pipe:
                third.pipe.load(folder / "dp" / "latest", third.optimizer)
                fresh = Run(blocks(), devices=2)
                with fresh.pipe:
                    fresh.pipe.load(folder / "dp" / "latest", fresh.optimizer)
                    same(third.whole(), fresh.whole())


def _refuses(folder: Path) -> None:
    rank = dist.get_rank()
    each = Run(blocks(), mesh=mesh_of("dp"))
    with each.pipe:
        with pytest.raises(CheckpointError, match=r"not the folder that the first rank has: save to a folder that all"):
            Checkpoints(folder / ("mine" if rank == 3 else "ours"), each.pipe)
        with pytest.raises(CheckpointError, match=r"extra.number is 0 on rank 0 and 1 on rank 2; make the same calls"):
            each.pipe.save(folder / "a", each.optimizer, extra={"number": int(rank == 2)})
        words = r"the hash of extra.a.0 is '\w+' on rank 0 and '\w+' on rank 3; make the same calls"
        with pytest.raises(CheckpointError, match=words):
            each.pipe.save(folder / "a", each.optimizer, extra={"a": [torch.tensor([1.0, float(rank == 3)])]})
        words = r"the list of keys in extra is 'a' on rank 0 and 'a, b' on rank 2; make the same calls"
        with pytest.raises(CheckpointError, match=words):  # what only one rank has was saved as if all had it
            each.pipe.save(folder / "a", each.optimizer, extra={"a": 1, **({"b": 2} if rank == 2 else {})})
        thing = object() if rank == 1 else None
        with pytest.raises(
            CheckpointError, match=r"extra.thing is a object" if rank == 1 else r"rank 1 can't save: ext"
        ):
            each.pipe.save(folder / "a", each.optimizer, extra={"thing": thing})
        each.step()  # nothing was broken off
        disk = CountedDisk(3, full(28)) if rank == 3 else None
        with Checkpoints(folder / "full", each.pipe, background=False, disk=disk) as run:
            words = r"can't save .*full/step-00000001: .*: No space left on device; an earlier checkpoint is as it was"
            with pytest.raises(CheckpointError, match=words if rank == 3 else f"rank 3 can't save: {words}"):
                run.save(each.optimizer)
            assert run.saved == []
            run.save(each.optimizer)
            assert len(run.saved) == 1
        if rank == 1:
            path = next((folder / "full" / "latest").glob("shard-00003*"))
            os.truncate(path, path.stat().st_size - 1)
        dist.barrier()
        before = each.whole()
        with pytest.raises(CheckpointError, match=r"shard-00003.*bytes, and should have"):
            each.pipe.load(folder / "full" / "latest", each.optimizer)
        same(before, each.whole())


def test_replicas_and_sharded_stages_go_on_and_a_rank_that_can_not_stops_all(launch: Launch, tmp_path: Path) -> None:
    launch(on_four_ranks, 4, str(tmp_path))
    for kind in ("dp", "fsdp", "tp"):
        (checkpoint,) = (tmp_path / kind).glob("step-*")
        assert list(faults(checkpoint)) == []
        plain = Run(blocks(), devices=2)
        with plain.pipe:
            plain.pipe.load(checkpoint, plain.optimizer)
            plain.step()
    manifest = read_manifest(next((tmp_path / "dp").glob("step-*")))
    sizes = [each.size for each in manifest.files.values()]
    assert len(sizes) == 4  # replicas write their shares
    assert max(sizes) < 1.5 * min(sizes)
    fsdp = read_manifest(next((tmp_path / "fsdp").glob("step-*"))).tensors["model.0.up.weight"]
    assert sorted(piece.offsets for piece in fsdp.pieces) == [(0, 0), (97, 0)]


def normed() -> nn.Sequential:
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(4, 100 * WIDTH), nn.BatchNorm1d(100 * WIDTH), nn.Linear(100 * WIDTH, 4))


def with_large_buffers(folder: str) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    with gapless.Pipeline(normed(), mesh=mesh, microbatches=2, loss=F.mse_loss) as pipe:
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
        pipe.step(x, x)
        pipe.save(Path(folder, "saved"), None)
        torch.save(pipe.state_dict(), Path(folder, str(dist.get_rank())))


def test_buffers_are_those_of_the_first_replica_however_large(launch: Launch, tmp_path: Path) -> None:
    """Replicas shared out what they had to write by its size, and large statistics came from several of them."""
    launch(with_large_buffers, 2, str(tmp_path))
    first, second = (torch.load(tmp_path / rank) for rank in "01")
    with gapless.Pipeline(normed(), devices=1, microbatches=2, loss=F.mse_loss) as pipe:
        pipe.load(tmp_path / "saved")
        for name, value in pipe.state_dict().items():
            assert torch.equal(value, first[name]), name
    assert not torch.equal(first["1.running_mean"], second["1.running_mean"])
