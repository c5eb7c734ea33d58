"""What runs: one process with a thread for each device, or the ranks that torchrun started, one for each device.

With more ranks than devices there are replicas: `devices = 4` on 8 ranks are two pipelines of four. Ranks that decide
alone, by their clocks or by what they find on disk, would go different ways, so the first one decides for all.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from gapless.distributed import init_process_group
from gapless.errors import ConfigError, GaplessError
from gapless.pipeline.arguments.checks import check_system
from gapless.train.config.config import Config
from gapless.units import show_count

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The processes of a run, as seen from one of them. `mesh` is None where there is only one."""

    rank: int = 0
    size: int = 1
    replica: int = 0
    replicas: int = 1
    mesh: "DeviceMesh | None" = None
    group: Any = None  # for what ranks tell each other about the run

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def share(self) -> tuple[int, int]:
        return self.replica, self.replicas

    def decided(self, value: T) -> T:
        """What the first one has, on all."""
        if self.mesh is None:
            return value
        found: list[Any] = [value]
        dist.broadcast_object_list(found, src=0, group=self.group)
        return found[0]  # type: ignore[no-any-return]

    def gathered(self, value: T) -> list[T]:
        """What each of them has, by rank, on all."""
        if self.mesh is None:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def together(self, make: Callable[[], T]) -> T | None:
        """What `make` returns on the first one, and None elsewhere; where it fails there, all of them say so."""
        made, wrong = None, ""
        if self.first:
            try:
                made = make()
            except (GaplessError, OSError) as error:
                wrong = str(error)
        if wrong := self.decided(wrong):
            raise ConfigError(wrong)
        return made


def is_started() -> bool:
    """Whether torchrun started this process among others."""
    ranks = os.environ.get("WORLD_SIZE", "")
    return "RANK" in os.environ and ranks.isdecimal() and int(ranks) > 1


@contextmanager
def joined(config: Config) -> Iterator[Ranks]:
    """The ranks of this run; their process group ends with it."""
    if not is_started():
        yield Ranks()
        return
    check_system()
    from torch.distributed.device_mesh import init_device_mesh

    size, devices = int(os.environ["WORLD_SIZE"]), config.num_devices
    if size % devices:
        fitting = f"--nproc-per-node {devices}" if size < devices else f"a multiple of {show_count(devices, 'rank')}"
        raise ConfigError(
            f"torchrun started {show_count(size, 'rank')}, but pipeline.devices is {devices}, one rank for each: start "
            f"{fitting}, or --set pipeline.devices={size}"
        )
    kind = "cuda" if _on_gpus(config) else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    try:
        dims = {"dp": size // devices, "pp": devices} if size > devices else {"pp": devices}
        mesh = init_device_mesh(kind, tuple(dims.values()), mesh_dim_names=tuple(dims))
        rank = dist.get_rank()
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.pipeline.timeout))
        yield Ranks(rank, size, rank // devices, size // devices, mesh, group)
    finally:
        dist.destroy_process_group()


def _on_gpus(config: Config) -> bool:
    """A number of devices means GPUs where each rank of this host has one."""
    devices = config.pipeline.devices
    if isinstance(devices, int):
        return torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return devices[0].startswith("cuda")
