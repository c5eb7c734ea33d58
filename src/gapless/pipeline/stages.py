"""The stages of this process, made from the layers that a partition gives them."""

import warnings
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from gapless.model.capture import Captured
from gapless.model.layers import Layers
from gapless.model.materialise import Init, materialise, release
from gapless.model.uses import shared_buffers
from gapless.pipeline.arguments import check_data
from gapless.schedule.action import Kind, Schedule
from gapless.stage.compiled import Compiler, compiled
from gapless.stage.stage import Remat, Stage
from gapless.stage.stored import Stored


def layers_of(model: Layers | Captured, partition: Sequence[int]) -> list[list[Any]]:
    """Of each stage, wherever it is."""
    return [model.layers[start:end] for start, end in pairwise([0, *accumulate(partition)])]


def make_stages(
    model: Layers | Captured,
    partition: Sequence[int],
    schedule: Schedule,
    here: Sequence[int],
    devices: Sequence[torch.device],
    *,
    remat: Sequence[Remat],
    loss: Any,
    init: Init | None,
    compiler: Compiler | None,
    **options: Any,
) -> dict[int, Stage]:
    """Those of `here`, on their devices, which `devices` has for every stage; layers of others are let go of."""
    halves = {action.stage for row in schedule.rows for action in row if action.kind is Kind.WEIGHT_GRAD}
    parts = layers_of(model, partition)
    elsewhere = [layer for stage, layers in enumerate(parts) if stage not in here for layer in layers]
    if isinstance(model, Captured):
        stored = Stored(never_set=model.never_set)
    else:
        stored = Stored(model.module, elsewhere=elsewhere)
    stages = {}
    for stage in here:
        layers, device = parts[stage], devices[stage]
        if init is not None:
            materialise(model.module, layers, device, init)
        for layer in layers:
            if isinstance(layer, nn.Module):
                check_data(layer)
                layer.to(device)
        stages[stage] = Stage(
            compiled(layers, compiler),
            first_layer=sum(partition[:stage]),
            remat=remat[stage],
            split=stage in halves,
            loss=loss if stage == len(parts) - 1 else None,
            spread=stage == 0 and isinstance(model, Layers),
            stored=stored,
            **options,
        )
    shared = shared_buffers(model.module, [*parts[:-1], [*parts[-1], loss]])
    for made in stages.values():
        made.share_buffers(shared)
    if isinstance(model, Layers):  # a traced module may have to be traced again
        release(elsewhere, [part for stage in stages.values() for part in (*stage.layers, stage.loss)])
    return stages


def warn_of_unsplit(stages: Iterable[Stage]) -> None:
    """Where a compiled layer makes all of a backward that the schedule splits."""
    count = sum(stage.num_compiled for stage in stages if stage.split)
    if count:
        warnings.warn(
            f"{count} compiled layers are in stages with a split backward: compiled layers can't defer their weight "
            "gradients, so these are computed with the input gradients",
            stacklevel=5,
        )
