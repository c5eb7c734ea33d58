"""What a user asks of the schedule of a pipeline. A Plan or a Replication says most of it, and nothing else may then be
asked for than what it says.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from gapless.errors import ConfigError
from gapless.plan.asynchronous.replicate import Replication
from gapless.plan.plan import Plan
from gapless.run.world import World
from gapless.schedule.action import Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.recipes import RECIPES
from gapless.stage.stage import Remat
from gapless.units import show_count

from .checks import at_least_one


class ScheduleArguments(NamedTuple):
    """As `Pipeline` takes them."""

    schedule: str | Schedule | Plan | Replication | None
    microbatches: int | None
    partition: Sequence[int] | None
    replicas: Sequence[int] | None
    remat: Remat | Sequence[Remat]
    costs: Costs | None
    stages_per_device: int | None

    def default(self, model: Any, devices: Sequence[torch.device]) -> str:
        """1f1b; on GPUs zb-v, whose bubble is smaller, unless something was asked for that it may not suit, or two
        stages per device would be more work than one.
        """
        count, blocks = len(devices), _equal_layers(model)
        own = (self.partition, self.replicas, self.costs, self.stages_per_device)
        suits = count > 1 and all(each is None for each in own) and self.remat == "none"
        on_gpus = all(device.type == "cuda" for device in devices)
        enough = self.microbatches is None or self.microbatches >= 2 * count - 1
        fits = blocks >= 2 * count and 2 * -(-blocks // (2 * count)) <= -(-blocks // count)
        return "zb-v" if suits and on_gpus and enough and fits else "1f1b"

    def settled(self, model: Any, layers: Any, world: World, traced: bool) -> "ScheduleArguments":
        """Checked, and with what a plan or a replication brings. As many stages per device as asked, or as many as the
        partition has, where the recipe leaves a choice.
        """
        found = self
        if self.schedule is None:  # zb-v sends twice as much
            found = self._replace(schedule=self.default(layers or model, world.devices) if world.near else "1f1b")
        if isinstance(self.schedule, Replication):
            self._check_replication(self.schedule)
            own = self.schedule
            found = self._replace(schedule="pipedream", partition=own.partition, replicas=own.replicas)
            found = found._replace(microbatches=self.microbatches or 1)
        found._check_replicas(world)
        plan = found.schedule
        if isinstance(plan, Plan):
            found._check_plan(plan, world)
            _check_cuts(plan, model, traced=traced)
            names = ("microbatches", "partition", "remat", "costs", "stages_per_device")
            return found._replace(**{name: getattr(plan, name) for name in names})
        partition, recipe = found.partition, RECIPES.get(plan) if isinstance(plan, str) else None
        if found.stages_per_device is not None or partition is None or recipe is None:
            return found
        free = recipe.stages_per_device is None or len(recipe.stages_per_device) > 1
        each, left = divmod(len(partition), len(world.devices))
        return found._replace(stages_per_device=each if free and not left else None)

    def _check_plan(self, plan: Plan, world: World) -> None:
        """It is for these devices, and nothing else was asked for than what it says."""
        replicas, partition, remat = world.num_replicas, self.partition, self.remat
        if (plan.mesh.replicas, plan.num_devices) != (replicas, len(world.devices)):
            raise ConfigError(
                f"the plan is for {_pipelines(plan.mesh.replicas, plan.num_devices)}, but there "
                f"{'is' if replicas == 1 else 'are'} {_pipelines(replicas, len(world.devices))}: make one for these"
            )
        each = (remat,) * len(plan.remat) if isinstance(remat, str) else tuple(remat)
        same = [
            ("microbatches", self.microbatches, plan.microbatches),
            ("partition", None if partition is None else list(partition), list(plan.partition)),
            ("remat", None if remat == "none" or each == plan.remat else remat, list(plan.remat)),
            ("stages_per_device", self.stages_per_device, plan.stages_per_device),
        ]
        others = [(name, asked, has) for name, asked, has in same if asked not in (None, has)]
        faults = [f"{name} is {asked!r}, but the plan has {has!r}" for name, asked, has in others]
        if self.costs is not None and self.costs != plan.costs:
            faults.append("costs are not those of the plan")
        if faults:
            raise ConfigError(f"{'; '.join(faults)}: leave these out, or make another plan")

    def _check_replication(self, found: Replication) -> None:
        """Nothing else was asked for than what it says."""
        asked = (("partition", self.partition, found.partition), ("replicas", self.replicas, found.replicas))
        for name, own, has in asked:
            if own is not None and tuple(own) != has:
                raise ConfigError(f"{name} is {list(own)}, but the Replication has {list(has)}: leave it out")

    def _check_replicas(self, world: World) -> None:
        """Of each stage, on ranks of their own."""
        replicas = self.replicas
        if replicas is None:
            return
        if not isinstance(replicas, Sequence) or isinstance(replicas, str):
            raise ConfigError(f"replicas is {replicas!r:.40}, but it must be a list with a number for each stage")
        for count in replicas:
            at_least_one("a number in replicas", count)
        if self.schedule != "pipedream":
            raise ConfigError("replicas= is for schedule='pipedream', which runs in streams: leave it out, or use dp")
        if world.one_process and max(replicas, default=1) > 1:
            raise ConfigError(
                "replicas= is for mesh=, with a rank for every replica, and devices= are of one process: run it under "
                "torchrun with mesh=init_device_mesh('cpu', (ranks,), mesh_dim_names=('pp',))"
            )
        if world.num_replicas > 1:
            raise ConfigError(
                f"the mesh has {world.num_replicas} replicas of the whole pipeline (dp), and replicas= gives each "
                "stage its own: use a mesh of pp alone, or leave out replicas="
            )


def _equal_layers(model: Any) -> int:
    """The most layers of one kind that a list in the model has."""
    lists = model.modules() if isinstance(model, nn.Module) else [model]
    kinds = (Counter(map(type, each)) for each in lists if isinstance(each, nn.ModuleList | Sequence | nn.Sequential))
    return max((max(kind.values()) for kind in kinds if kind), default=0)


def _pipelines(replicas: int, devices: int) -> str:
    return f"{show_count(replicas, 'pipeline')} of {show_count(devices, 'device')}"


def _check_cuts(plan: Plan, model: Any, *, traced: bool) -> None:
    """It is for a model that is cut in the same way: in its graph, or between its layers."""
    name = type(model).__name__
    if traced and plan.cuts is None:
        raise ConfigError(
            f"the plan counts {show_count(sum(plan.partition), 'layer')} of a sequence, but this {name} is traced: "
            "give its layers with layers=, or make a plan for it"
        )
    if not traced and plan.cuts is not None:
        raise ConfigError(
            f"the plan cuts a traced graph of {plan.cuts.num_nodes} nodes, but this {name} is cut between its layers: "
            "make a plan for these"
        )
