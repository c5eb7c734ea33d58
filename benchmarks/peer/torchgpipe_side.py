"""torchgpipe as a contestant: what `ranks` runs, on a single rank, since its devices are threads.

Its forwards are pipelined by threads of its own, its backwards by autograd's, of which there is one for each
accelerator and one for all CPUs. So on CPUs its backwards run one after another.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import nn

from benchmarks.peer.contest import Contest
from benchmarks.peer.one_core import on_one_core

NOTE = "torchgpipe's backwards run on autograd's threads: one for all CPUs, so they are not parallel here"


def missing() -> str:
    """Why it can't take part, if it can't."""
    return "" if find_spec("torchgpipe") else "torchgpipe is not installed: pip install torchgpipe"


def prepare(contest: Contest, name: str, rank: int) -> tuple[str | None, Callable[[], object]]:
    """Its only schedule, gpipe, without recomputing: a call that runs one step."""
    torchgpipe: Any = import_module("torchgpipe")
    layers = nn.Sequential(*(contest.stage(1) for _ in range(contest.devices)))
    with on_one_core():  # its threads start here
        model = torchgpipe.GPipe(
            layers,
            balance=[1] * contest.devices,
            devices=[contest.device] * contest.devices,
            chunks=contest.microbatches,
            checkpoint="never",
        )
    inputs, target = contest.inputs().requires_grad_(contest.inputs_need_grad), contest.target()
    return None, lambda: contest.loss(model(inputs), target).backward()
