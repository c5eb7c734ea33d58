"""What holds the memory of a pipeline's devices, in bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gapless.stage.graphs.graphed import GraphedStage
from gapless.stage.stage import Stage
from gapless.units import show_bytes


@dataclass(frozen=True)
class StageMemory:
    """What a stage of this process holds between steps. A weight that several stages share counts in each.

    weights    parameters and buffers
    gradients  in `.grad`
    optimizer  state of the optimizer for these parameters, on the same device
    copies     of both, while a step of `Pipeline.training` is under way
    casts      of the weights, for CUDA graphs under autocast
    graphs     what CUDA graphs have reserved
    """

    stage: int
    device: str
    weights: int
    gradients: int
    optimizer: int
    copies: int
    casts: int
    graphs: int


@dataclass(frozen=True)
class HeldMemory:
    """The stages of this process, and of each of its GPUs what is in use now and was at the peak; the rest of it are
    inputs, outputs, messages, and what is not the pipeline's.
    """

    stages: tuple[StageMemory, ...]
    gpus: Mapping[str, tuple[int, int]]

    def __repr__(self) -> str:
        headings = [field.name for field in dataclasses.fields(StageMemory)]
        rows = [[str(row[0]), row[1], *map(show_bytes, row[2:])] for row in map(dataclasses.astuple, self.stages)]
        lines = ["".join(f"{cell:>12}" for cell in row).rstrip() for row in (headings, *rows)]
        for gpu, (now, peak) in self.gpus.items():
            lines.append(f"{gpu}: {show_bytes(now)} in use, {show_bytes(peak)} at the peak")
        return "\n".join(lines)


def held_memory(stages: Mapping[int, Stage], optimizer: Any, copies: Mapping[Any, int]) -> HeldMemory:
    """Of these stages; the optimizer is None, or has their parameters among others. `copies`: bytes by parameter."""
    state: Mapping[Any, Any] = {} if optimizer is None else optimizer.state
    found, gpus = [], {}
    for number, stage in sorted(stages.items()):
        parameters = stage.parameters()
        buffers = [each for part in stage.layers if isinstance(part, torch.nn.Module) for each in part.buffers()]
        device = next((each.device for each in (*parameters, *buffers)), torch.device("cpu"))
        states = (each for parameter in parameters for each in state.get(parameter, {}).values())
        graphed = stage if isinstance(stage, GraphedStage) else None
        found.append(
            StageMemory(
                number,
                str(device),
                _bytes((*parameters, *buffers)),
                _bytes(each.grad for each in parameters if each.grad is not None),
                _bytes(each for each in states if isinstance(each, Tensor) and each.device == device),
                sum(copies.get(each, 0) for each in parameters),
                0 if graphed is None else _bytes(graphed.likenesses.casts.places()),
                0 if graphed is None else graphed.reserved(),
            )
        )
        if device.type == "cuda":
            gpus[str(device)] = in_use(device)
    return HeldMemory(tuple(found), gpus)


def in_use(gpu: torch.device) -> tuple[int, int]:
    """What this process uses of a GPU, in bytes: now, and at most at the peak. Torch's own figures leave out what
    copies still read, and what graphs need whenever they run.
    """
    index = gpu.index if gpu.index is not None else torch.cuda.current_device()
    segments = (each for each in torch.cuda.memory_snapshot() if each["device"] == index)
    blocks = (block for each in segments if tuple(each["segment_pool_id"]) != (0, 0) for block in each["blocks"])
    resting = sum(block["size"] for block in blocks if block["state"] == "inactive")
    counted = torch.cuda.memory_stats(gpu)
    return counted["active_bytes.all.current"] + resting, counted["active_bytes.all.peak"] + resting


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of their storages, each once."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())
