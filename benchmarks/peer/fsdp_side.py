"""FSDP2 as a contestant, what `ranks` runs: the whole model on every rank, its weights shared out among them.

Every rank takes its share of the samples, all at once. Weights are gathered before a layer runs, and gradients are
summed after it. There is no bubble, and weights travel instead of activations.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.peer.contest import Contest


def prepare(contest: Contest, name: str, rank: int) -> tuple[str | None, Callable[[], object]]:
    """A call that runs one step on this rank. The name says nothing more."""
    if contest.microbatches % contest.devices:
        raise ValueError(
            f"{contest.microbatches} microbatches can't be shared out evenly among {contest.devices} ranks"
        )
    torch.manual_seed(0)
    mesh = init_device_mesh(contest.device.type, (contest.devices,))
    model: Any = nn.Sequential(*(contest.stage(1) for _ in range(contest.devices)))
    for stage in model:
        fully_shard(stage, mesh=mesh)
    fully_shard(model, mesh=mesh)
    inputs = contest.inputs().tensor_split(contest.devices)[rank]
    target = contest.target()
    return None, lambda: contest.loss(model(inputs), target).backward()
