"""What a pipeline was asked for, and what of it all ranks must have been asked for alike."""

from collections.abc import Callable
from dataclasses import dataclass
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
