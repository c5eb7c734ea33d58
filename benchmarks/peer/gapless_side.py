"""A pipeline under a mesh as a contestant: what `ranks` runs."""

from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.emulated import batch, pipeline
from benchmarks.peer.contest import Contest
from benchmarks.peer.steady import has_steps, steadily
from gapless.run.world import TransportName


def prepare(contest: Contest, name: str, rank: int) -> tuple[str | None, Callable[[], object]]:
    """The order of the actions as they are run, and a call that runs one step on this rank. A name is that of a
    schedule, and may say over which transport, that shapes are "static", that its actions are "graphed" as CUDA graphs,
    and that the step is "timed": its timeline is recorded.
    """
    name, timed, _ = name.partition(" timed")
    name, graphed, _ = name.partition(" graphed")
    name, static, _ = name.partition(" static")
    torch.manual_seed(0)  # every rank makes the same weights
    schedule, _, transport = name.partition(" over ")
    mesh = init_device_mesh(contest.device.type, (contest.devices,), mesh_dim_names=("pp",))
    over = cast(TransportName, transport or "auto")
    pipe = pipeline(
        contest,
        schedule,
        mesh=mesh,
        transport=over,
        static_shapes=bool(static),
        timeline=bool(timed),
        graphs=bool(graphed),
    )
    inputs, target = batch(contest)
    if not has_steps(schedule):
        return pipe.schedule.text(), steadily(contest, pipe, inputs, target)
    for _ in range(contest.first_steps if graphed or not timed else 0):
        pipe.step(inputs, target)
    if graphed:
        found: list[str] = [""] * contest.devices
        dist.all_gather_object(found, next((line for line in repr(pipe).splitlines() if "no graphs" in line), ""))
        if any(found):
            raise ValueError(next(filter(None, found)).strip())
    return pipe.schedule.text(), lambda: pipe.step(inputs, target)
