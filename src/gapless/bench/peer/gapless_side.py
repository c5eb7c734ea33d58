"""A pipeline under a mesh as a contestant: what `ranks` runs."""

from collections.abc import Callable

import torch
from torch.distributed.device_mesh import init_device_mesh

from gapless.bench.emulated import batch, pipeline
from gapless.bench.peer.contest import Contest


def prepare(contest: Contest, name: str, rank: int) -> tuple[str | None, Callable[[], object]]:
    """The order of the actions as they are run, and a call that runs one step on this rank."""
    torch.manual_seed(0)  # every rank makes the same weights
    pipe = pipeline(contest, name, mesh=init_device_mesh("cpu", (contest.devices,), mesh_dim_names=("pp",)))
    inputs, target = batch(contest)
    return pipe.schedule.text(), lambda: pipe.step(inputs, target)
