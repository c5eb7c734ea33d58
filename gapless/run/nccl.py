"""NCCL groups of gapless's own: from GPU to GPU, where every rank has one to itself.

What is posted in such a group runs in order, on the GPU. Each channel has a group of its two ranks, so the one order in
it is the producer's, which the deadlock proof stands on.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gapless.run.mesh import part_of_store


def is_used(mesh: DeviceMesh) -> bool:
    """Whether the user's own groups take NCCL for tensors of a GPU. With Gloo, several ranks may share one."""
    if mesh.device_type != "cuda":
        return False
    name: str = mesh.get_group("pp")._get_backend(torch.device("cuda")).name()
    return name == "nccl"


def connected(name: str, ranks: Sequence[int], number: int) -> Any:
    """A group of these ranks, in which this one has that number; connections are made when they are first used."""
    nccl: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined, unused-ignore]
    return nccl(part_of_store(f"nccl {name}", ranks), number, len(ranks), nccl.Options())


class ChannelGroups:
    """Makes the group of each channel, of the ranks of one pipeline."""

    def __init__(self, ranks: Sequence[int], device: int) -> None:
        self._ranks, self._device = ranks, device

    def __call__(self, source: int, target: int, kind: str) -> Any:
        pair = sorted((source, target))
        name = f"{kind} from {source} to {target}"
        return connected(name, [self._ranks[each] for each in pair], pair.index(self._device))
