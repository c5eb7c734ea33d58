"""Stages with replicas as the planner has chosen them, as a contestant: what `ranks` runs."""

from collections.abc import Callable

import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.peer.contest import Contest
from benchmarks.planner.replicas import model, planned, stepping
from gapless.pipeline.pipeline import Pipeline


def prepare(contest: Contest, name: str, rank: int) -> tuple[str | None, Callable[[], object]]:
    """A call that trains for a while on this rank. The name says nothing more."""
    torch.manual_seed(0)  # every rank makes the same weights
    made = planned(contest.devices, contest.seconds)
    mesh = init_device_mesh("cpu", (contest.devices,), mesh_dim_names=("pp",))
    pipe = Pipeline(model(made), mesh=mesh, schedule=made.found, loss=contest.loss)
    return pipe.schedule.text(), stepping(made, pipe)
