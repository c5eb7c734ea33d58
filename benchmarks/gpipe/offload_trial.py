"""Does a model fit? As many ranks as its plan has devices share a GPU, each with so much of its memory, and train it
for two steps: what `ranks` runs.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.gpipe.giants import VOCABULARY, transformer
from benchmarks.peer.contest import Contest
from gapless import Pipeline, offload_optimizer
from gapless.plan.plan import Plan
from gapless.zoo.gpt import next_token_loss

_STEPS = 2


def trial_ids(contest: Contest, microbatches: int) -> torch.Tensor:
    """So many microbatches of tokens, the same always."""
    shape = (microbatches * contest.samples, contest.tokens)
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(0))


def prepare_trial(contest: Contest, name: str, rank: int) -> tuple[None, Callable[[], object]]:
    """Trains a GPT; the name has its depth, its plan, and the bytes that a rank may take, as JSON."""
    depth, plan, memory = json.loads(name)
    planned = Plan.from_json(plan)
    if contest.on_gpu:  # without one everything fits
        total = torch.cuda.get_device_properties(contest.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory / total))
    mesh = init_device_mesh(contest.device.type, (contest.devices,), mesh_dim_names=("pp",))
    with torch.device("meta"):
        layers = transformer(depth, contest.size, contest.tokens)
    ids = trial_ids(contest, contest.microbatches)
    more: Any = {"transport": "memory" if contest.on_gpu else "auto", "timeout": 90.0, "init": "reset_parameters"}
    pipe = Pipeline(layers, mesh=mesh, schedule=planned, loss=next_token_loss, **more)
    optimizer = torch.optim.AdamW([each for each in pipe.parameters() if each.numel()])
    if planned.offload_optimizer:
        offload_optimizer(optimizer)
    for _ in range(_STEPS):
        pipe.step(ids, ids)
        optimizer.step()
        optimizer.zero_grad()
    contest.settle()
    return None, lambda: None
