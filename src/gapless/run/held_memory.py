"""What holds the memory of a pipeline's devices, in bytes."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gapless.schedule.action import Action, Kind, Schedule
from gapless.stage.graphs.graphed import GraphedStage
from gapless.stage.stage import Stage
from gapless.units import show_bytes

messages: Counter[str] = Counter()  # bytes that this process has taken for them on each GPU, beside torch's memory


@dataclass(frozen=True)
class StageMemory:
    """What a stage of this process holds. A weight that several stages share counts in each.

    weights      parameters and buffers
    gradients    in `.grad`
    optimizer    state of the optimizer for these parameters, on the same device
    copies       of both, while a step of `Pipeline.training` is under way
    activations  kept from forwards to backwards when its GPU holds most of them, as measured in the second step; None:
                 not measured, as on a CPU, or where several devices of a process share the GPU
    deferred     kept for weight gradients (`W`) at that moment
    casts        of the weights, for CUDA graphs under autocast
    graphs       what CUDA graphs have reserved, activations among it
    """

    stage: int
    device: str
    weights: int
    gradients: int
    optimizer: int
    copies: int
    activations: int | None
    deferred: int | None
    casts: int
    graphs: int


@dataclass(frozen=True)
class HeldMemory:
    """The stages of this process, and of each of its GPUs what is in use now and was at the peak, and beside that what
    was taken for messages. The rest are inputs, outputs, what a single action needs, and what is not the pipeline's.
    """

    stages: tuple[StageMemory, ...]
    gpus: Mapping[str, tuple[int, int]]
    messages: Mapping[str, int]

    def __repr__(self) -> str:
        headings = [field.name for field in dataclasses.fields(StageMemory)]
        rows = [
            [str(row[0]), row[1], *("-" if each is None else show_bytes(each) for each in row[2:])]
            for row in map(dataclasses.astuple, self.stages)
        ]
        lines = ["".join(f"{cell:>12}" for cell in row).rstrip() for row in (headings, *rows)]
        for gpu, (now, peak) in self.gpus.items():
            beside = f", and {show_bytes(self.messages[gpu])} for messages" if self.messages[gpu] else ""
            lines.append(f"{gpu}: {show_bytes(now)} in use, {show_bytes(peak)} at the peak{beside}")
        return "\n".join(lines)


def held_memory(
    stages: Mapping[int, Stage], schedule: Schedule, optimizer: Any, copies: Mapping[Any, int]
) -> HeldMemory:
    """Of these stages; the optimizer is None, or has their parameters among others. `copies`: bytes by parameter."""
    state: Mapping[Any, Any] = {} if optimizer is None else optimizer.state
    found, gpus = [], {}
    kept: Counter[tuple[int, bool]] = Counter()
    for row in schedule.rows:
        kept |= _most_kept([action for action in row if action.stage in stages], stages)
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
                kept[number, False] if stage.changes else None,
                kept[number, True] if stage.changes else None,
                0 if graphed is None else _bytes(graphed.likenesses.casts.places()),
                0 if graphed is None else graphed.reserved(),
            )
        )
        if device.type == "cuda":
            gpus[str(device)] = in_use(device)
    return HeldMemory(tuple(found), gpus, {gpu: messages[gpu] for gpu in gpus})


def _most_kept(row: Iterable[Action], stages: Mapping[int, Stage]) -> Counter[tuple[int, bool]]:
    """What the actions of a device keep when that is most: bytes by stage, and by whether only a W needs them."""
    usual = {
        (number, kind): statistics.median_low(changes)
        for number, stage in stages.items()
        if not isinstance(stage, GraphedStage) or not stage.reserved()
        for kind, changes in (stage.changes or {}).items()
    }
    held: dict[tuple[int, int], tuple[int, bool]] = {}  # by stage and microbatch
    most: Counter[tuple[int, bool]] = Counter()
    for stage, kind, microbatch in row:
        bytes_before, _ = held.pop((stage, microbatch), (0, False))
        if kind not in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
            held[stage, microbatch] = bytes_before + usual.get((stage, kind.value), 0), kind is Kind.INPUT_GRAD
        now: Counter[tuple[int, bool]] = Counter()
        for (number, _), (size, deferred) in held.items():
            now[number, deferred] += size
        most = max(most, now, key=Counter.total)
    return most


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
