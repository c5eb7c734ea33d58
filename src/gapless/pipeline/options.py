"""What a pipeline was asked for, and what of it all ranks must have been asked for alike."""

import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from inspect import getsource
from typing import Any

from torch import Tensor, nn

from gapless.model.materialise import Init
from gapless.model.traced.capture import find_loss, own_loss
from gapless.model.traced.graph_cuts import GraphCuts
from gapless.pipeline.arguments.checks import named
from gapless.pipeline.schedules import Schedules
from gapless.schedule.action import Schedule
from gapless.stage.batch import microbatch as mb
from gapless.stage.compiled import Compiler
from gapless.stage.graphs.graphed import Graphs
from gapless.stage.norm.running_statistics import BatchNorm
from gapless.stage.shared.tie import Tied

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Options:
    """As `Pipeline` takes them, checked, and with what a plan brings."""

    schedules: Schedules
    microbatches: int
    loss: Loss
    loss_weight: mb.LossWeight
    seed: int
    batchnorm: BatchNorm
    tied: Tied
    compiler: Compiler | None
    init: Init | None
    cuts: GraphCuts | None
    batch_dims: Any
    target_dims: Any
    timeline: bool
    graphs: Graphs

    @property
    def told_loss(self) -> Callable[[Any, Any], Tensor | None]:
        """That of a microbatch, for a result. In an evaluation without a target a model need not have one."""
        if self.loss is not own_loss:
            return self.loss
        return lambda outputs, target: find_loss(outputs) if target is None else own_loss(outputs)

    def facts(self, schedule: Schedule, partition: tuple[int, ...], module: nn.Module) -> dict[str, Any]:
        """What all ranks must have been asked for alike."""
        return {
            "microbatches": self.microbatches,
            "schedule": schedule.name or "one without a name",
            "stages": schedule.num_stages,
            "partition": list(partition),
            "cuts": None if self.cuts is None else list(self.cuts.after),
            "seed": self.seed,
            "remat": self.schedules.remat_of(schedule.num_stages),
            "loss": named(self.loss),
            "loss_weight": named(self.loss_weight),
            "batchnorm": self.batchnorm,
            "tied": self.tied,
            "costs": repr(self.schedules.costs),
            "memory_limit": repr(self.schedules.memory_limit),
            "objective": self.schedules.objective,
            "compile": repr(self.compiler),
            "timeline": self.timeline,
            "graphs": self.graphs,
            "batch_dims": repr(self.batch_dims),
            "target_dims": repr(self.target_dims),
            "row of device": {str(k): line for k, line in enumerate(schedule.csv().splitlines())},
            "model": _tensors(module),
            "module": _parts(module),
            **({"weights of the loss": _tensors(self.loss)} if isinstance(self.loss, nn.Module) else {}),
        }


def _tensors(module: nn.Module) -> dict[str, str]:
    """Names, shapes and types of all tensors of a model."""
    tensors = {
        **{name: (each, "" if each.requires_grad else ", frozen") for name, each in module.named_parameters()},
        **{name: (each, ", a buffer") for name, each in module.named_buffers()},
    }
    return {
        name: f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape)}{word}"
        for name, (each, word) in tensors.items()
    }


def _parts(module: nn.Module) -> dict[str, str]:
    """The class of each module, what torch's say of themselves, and of others a number for the code of their forward:
    with another rate of a dropout, say, a rank would train its part of another model.
    """
    codes = {kind: _code(kind) for kind in {type(part) for part in module.modules()}}
    return {
        name: type(part).__name__ + (codes[type(part)] or f"({part.extra_repr()})")
        for name, part in module.named_modules()
        if not isinstance(part, nn.ParameterList | nn.ParameterDict)  # they say on which GPU they are
    }


def _code(kind: type[nn.Module]) -> str:
    if kind.__module__.startswith("torch.nn.modules."):
        return ""
    with suppress(OSError, TypeError):  # what was typed in has no source
        return f" with code {zlib.crc32(getsource(kind.forward).encode()):08x}"
    return " with unknown code"
