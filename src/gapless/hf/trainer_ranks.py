"""One process per device, under torchrun. To Trainer and accelerate a whole pipeline is one process:

    rank        0  1  2  3       torchrun --nproc-per-node 4, and dp=2
    replica     0  0  1  1       what Trainer takes for its processes: batches are dealt to these
    device      0  1  0  1       of the pipeline

The ranks of a pipeline get the same batches and make the same calls. Rank 0 alone writes.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.utils.operations import recursively_apply
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree
from transformers.training_args import ParallelMode

from gapless.errors import ConfigError
from gapless.pipeline.arguments.checks import at_least_one
from gapless.stage.devices import Devices, torch_devices
from gapless.units import show_count


class TrainerRanks:
    """All ranks, as `dp` replicas of a pipeline, seen from one of them."""

    def __init__(self, device_type: str, dp: int, devices: Devices | None) -> None:
        world = dist.get_world_size()
        if world % dp:
            raise ConfigError(f"dp is {dp}, but the {world} ranks can't be divided evenly among so many pipelines")
        given = torch_devices(devices) if isinstance(devices, str | torch.device) else devices
        count = given if given is None or isinstance(given, int) else len(given)
        if count not in (None, world // dp):
            raise ConfigError(
                f"devices is {show_count(count or 0, 'device')}, but this is one of {world} ranks with dp={dp}, so a "
                f"pipeline has {world // dp}: leave devices= out under torchrun, where every rank is one"
            )
        self.mesh = init_device_mesh(device_type, (dp, world // dp), mesh_dim_names=("dp", "pp"))
        self.replicas, self.devices = dp, world // dp
        self.replica, self.device = self.mesh.get_local_rank("dp"), self.mesh.get_local_rank("pp")
        self.is_first = dist.get_rank() == 0
        self._pipeline, _ = dist.new_subgroups_by_enumeration(self.mesh.mesh.tolist(), backend="gloo")

    def wait(self) -> None:
        """Until all ranks are here."""
        dist.barrier()

    def said(self, device: int, value: Any) -> Any:
        """What a device of this pipeline has, on all of them; tensors come on the CPU."""
        box = [pytree.tree_map_only(Tensor, lambda each: each.detach().cpu(), value) if device == self.device else None]
        dist.broadcast_object_list(box, group=self._pipeline, group_src=device)
        return box[0]

    def merged(self, own: Mapping[Any, Any]) -> dict[Any, Any]:
        """What the devices of this pipeline have, on all of them, one entry after another; the first one counts."""
        found: dict[Any, Any] = {}
        for device in range(self.devices):
            for key in self.said(device, list(own)):
                if key not in found:
                    found[key] = self.said(device, own.get(key))
        return found

    def of_replicas(self, tensor: Tensor) -> Tensor:
        """Those of all replicas, one after another, in the way of accelerate's gather."""
        if self.replicas == 1:
            return tensor
        mine = (tensor if tensor.dim() else tensor[None]).contiguous()
        rows = [torch.empty_like(mine) for _ in range(self.replicas)]
        dist.all_gather(rows, mine, group=self.mesh.get_group("dp"))
        return torch.cat(rows)


class _RankArguments:
    """TrainingArguments as Trainer is to see them."""

    ranks: ClassVar[TrainerRanks]
    plain: ClassVar[type[Any]]

    @property
    def world_size(self) -> int:
        return self.ranks.replicas

    @property
    def process_index(self) -> int:
        return self.ranks.replica

    @property
    def parallel_mode(self) -> ParallelMode:
        return ParallelMode.NOT_DISTRIBUTED

    @property
    def should_log(self: Any) -> bool:
        return bool(self.local_process_index == 0 if self.log_on_each_node else self.ranks.is_first)

    @property
    def should_save(self: Any) -> bool:
        return bool(self.local_process_index == 0 if self.save_on_each_node else self.ranks.is_first)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved and copied as what they were."""
        return object.__new__, (self.plain,), vars(self)


def ranks_of(args: Any, dp: int, devices: Devices | None) -> TrainerRanks | None:
    """None in one process. From here on the arguments say how many pipelines there are, and not how many ranks."""
    at_least_one("dp", dp)
    if args.world_size == 1:
        if (started := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            raise ConfigError(
                f"this is one of {started} processes, but accelerate has made no group of them, as on a machine "
                "without GPUs: set use_cpu=True in the arguments, or start one process"
            )
        if dp > 1:
            raise ConfigError(f"dp is {dp}, but this is one process: start it with torchrun, or leave dp= out")
        return None
    ranks, kind = TrainerRanks(args.device.type, dp, devices), type(args)
    args.__class__ = type(kind.__name__, (_RankArguments, kind), {"ranks": ranks, "plain": kind})
    return ranks


def devices_of(devices: Devices | None, args: Any) -> Devices:
    """Of one process: a number means GPUs, unless the arguments say CPU."""
    if devices is None:
        raise ConfigError(
            "devices= is missing: give how many, as devices=4, or start it with torchrun, a rank for each"
        )
    if not isinstance(devices, int):
        return devices
    if args.device.type == "cpu":
        return ["cpu"] * devices if devices > 0 else devices
    if devices > torch.cuda.device_count():
        raise ConfigError(
            f"devices is {devices}, but this machine has {show_count(torch.cuda.device_count(), 'GPU')}: give as many, "
            f'["cuda:0"] * {devices} for threads that share one, or use_cpu=True in the arguments'
        )
    return devices


class RankAccelerator(Accelerator):  # type: ignore[misc]
    """Accelerate where it deals batches to pipelines, wraps no model, and clips the gradients of all stages."""

    ranks: TrainerRanks
    clip: Callable[[float, float], Tensor]

    @property
    def num_processes(self) -> int:
        return self.ranks.replicas

    @property
    def process_index(self) -> int:
        return self.ranks.replica

    @property
    def distributed_type(self) -> Any:
        return DistributedType.NO

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        return self.clip(max_norm, norm_type)

    def gather(self, tensor: Any) -> Any:
        return recursively_apply(self.ranks.of_replicas, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        if not all(isinstance(each, Tensor) for each in pytree.tree_leaves(input_data)):
            raise ConfigError("an evaluation returned something other than tensors, which ranks can't gather")
        return super().gather_for_metrics(input_data)
