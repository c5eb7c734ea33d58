"""Does a model fit? As many ranks as its plan has devices share a GPU, each with so much of its memory, and train it
for two steps. The first rank that runs out of memory ends the trial; none outlives it.
"""

import contextlib
import json
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.peer.peer import start_ranks
from benchmarks.peer.ranks import begin, join_group
from gapless.pipeline.pipeline import Pipeline
from gapless.plan.plan import Plan
from gapless.stage.offload.optimizer_state import offload_optimizer
from gapless.zoo.gpt import gpt, next_token_loss

_VOCABULARY = 32_000
_STEPS = 2
_SECONDS = 90.0  # of a trial
TOO_LARGE = "out of memory"


@dataclass(frozen=True)
class GptOfAnyDepth:
    """A GPT of any depth, and what it is trained with."""

    width: int
    tokens: int
    samples: int
    microbatches: int

    def layers(self, depth: int) -> nn.Sequential:
        """With data only where the caller's default device has some."""
        return gpt(
            vocab=_VOCABULARY, width=self.width, depth=depth, heads=max(1, self.width // 64), context=self.tokens
        )

    def ids(self, microbatches: int) -> Tensor:
        """The same always."""
        shape = (microbatches * self.samples, self.tokens)
        return torch.randint(_VOCABULARY, shape, generator=torch.Generator().manual_seed(0))

    loss = staticmethod(next_token_loss)


class MemoryTrial:
    """Of one depth, for as long as the context lasts."""

    def __init__(self, model: GptOfAnyDepth, depth: int, plan: Plan, memory: int) -> None:
        self._asked = model, depth, json.dumps(plan.to_json()), memory
        self._ranks = plan.num_devices
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "MemoryTrial":
        self._answers = start_ranks(self._stack, self._ranks, _trained, *self._asked)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def reason(self) -> str:
        """Why it does not fit; empty where it does."""
        left, until, failed = list(self._answers), time.monotonic() + _SECONDS, ""
        while left:
            ready = wait(left, timeout=max(0.0, until - time.monotonic()))
            if not ready:
                return failed or f"not done within {_SECONDS:g} s"
            for connection in ready:
                assert isinstance(connection, Connection)
                left.remove(connection)
                try:
                    said = str(connection.recv())
                except EOFError:
                    said = "a rank has gone"
                if said == TOO_LARGE:
                    return said
                if said and not failed:  # others may say that it was memory
                    failed, until = said, min(until, time.monotonic() + 3.0)
        return failed


def _trained(
    rank: int, ranks: int, folder: str, answer: Connection, model: GptOfAnyDepth, depth: int, plan: str, memory: int
) -> None:
    """What a rank does: it answers with what went wrong, or with nothing."""
    begin(folder)
    try:
        _train(rank, ranks, folder, model, depth, Plan.from_json(json.loads(plan)), memory)
        answer.send("")
    except BaseException as error:
        while error.__cause__ is not None:
            error = error.__cause__
        out = isinstance(error, torch.OutOfMemoryError) or TOO_LARGE in str(error)
        answer.send(TOO_LARGE if out else f"rank {rank}: {type(error).__name__}: {str(error)[:300]}")
    os._exit(0)  # no farewell between ranks: the others may have gone


def _train(rank: int, ranks: int, folder: str, model: GptOfAnyDepth, depth: int, plan: Plan, memory: int) -> None:
    on_gpu = torch.cuda.is_available()  # without one everything fits
    if on_gpu:
        place = rank % torch.cuda.device_count()
        torch.cuda.set_device(place)
        share = memory / torch.cuda.get_device_properties(place).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    join_group(rank, ranks, folder, _SECONDS, "cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", (ranks,), mesh_dim_names=("pp",))
    with torch.device("meta"):
        layers = model.layers(depth)
    ids = model.ids(model.microbatches)
    more: Any = {"transport": "memory" if on_gpu else "auto", "timeout": _SECONDS}
    pipe = Pipeline(layers, mesh=mesh, schedule=plan, loss=model.loss, init="reset_parameters", **more)
    optimizer = torch.optim.AdamW([each for each in pipe.parameters() if each.numel()])
    if plan.offload_optimizer:
        offload_optimizer(optimizer)
    for _ in range(_STEPS):
        pipe.step(ids, ids)
        optimizer.step()
        optimizer.zero_grad()
    if on_gpu:
        torch.cuda.synchronize()
