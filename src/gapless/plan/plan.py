"""A plan is a value: partition, schedule, microbatches and remat, with what they are predicted to take.

It is written as JSON and read back as it was, so it can be made on one machine and run on another.
"""

import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from gapless.errors import ConfigError, GaplessError, printable
from gapless.model.traced.graph_cuts import GraphCuts
from gapless.plan.predict.breakdown import Breakdown
from gapless.plan.predict.footprint import Footprint
from gapless.plan.profile.machine import Mesh
from gapless.schedule.action import Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline
from gapless.units import show_bytes, show_count, show_seconds
from gapless.user_file import read_user_file


@dataclass(frozen=True)
class Searched:
    """How good a plan is known to be: no plan of the kinds that were searched is faster by more than `gap`.

    gap        as a share of the step, from a bound that no plan can be below
    complete   every choice was tried, or can't be better; `untried` counts the others
    cut_short  the time limit ended the search, so another machine may find another plan
    devices    how many there were; a plan may leave some idle
    """

    gap: float
    complete: bool
    cut_short: bool
    tried: int
    untried: int
    devices: int


Remat = Literal["none", "stage", "layer"]


@dataclass(frozen=True)
class Plan:
    """Everything that a Pipeline needs, with its predicted time and memory.

    recipe     the name of the schedule that `schedule` was made from
    partition  layers per stage; of a module that is traced, pieces of its graph
    remat      per stage "none", "stage" or "layer"
    samples    in one microbatch
    mesh       how many pipelines of how many devices
    costs      of the stages: seconds and bytes
    breakdown  of the predicted step, in seconds
    memory     of each device of a pipeline at its peak, and `limits` what each has (None: no limit)
    cuts       of a module that is traced: where its graph is cut
    caution    why the step may differ from the prediction, if known
    offload_optimizer  the plan is for an optimizer whose state is in host memory (`gapless.offload_optimizer`)
    batch      samples in a step, if it is not a multiple of `samples`: some microbatches are then smaller
    searched   how far was searched, and how good the plan is known to be
    """

    recipe: str
    schedule: Schedule
    partition: tuple[int, ...]
    remat: tuple[Remat, ...]
    samples: int
    mesh: Mesh
    costs: Costs
    breakdown: Breakdown
    memory: tuple[Footprint, ...]
    limits: tuple[int | None, ...]
    cuts: GraphCuts | None = None
    caution: str = ""
    offload_optimizer: bool = False
    batch: int | None = None
    searched: Searched | None = None

    def __post_init__(self) -> None:
        stages, devices = self.schedule.num_stages, self.schedule.num_devices
        counts = {len(self.partition), len(self.remat)}
        if counts != {stages} or {len(self.memory), len(self.limits), self.mesh.num_devices} != {devices}:
            raise ConfigError(
                f"the schedule has {show_count(stages, 'stage')} on {show_count(devices, 'device')}, but the plan has "
                f"a partition of {len(self.partition)}, remat for {len(self.remat)} and the memory of "
                f"{len(self.memory)}"
            )
        if self.cuts is not None:
            self.cuts.check(stages)

    @property
    def num_devices(self) -> int:
        """Of one pipeline."""
        return self.schedule.num_devices

    @property
    def stages_per_device(self) -> int:
        return self.schedule.num_stages // self.num_devices

    @property
    def microbatches(self) -> int:
        return self.schedule.num_microbatches

    @property
    def offload(self) -> tuple[str, ...]:
        """Per stage "none" or "activations": whether some of them wait in host memory."""
        leaving = {stage for stage, _ in self.schedule.offloaded}
        return tuple("activations" if stage in leaving else "none" for stage in range(self.schedule.num_stages))

    @property
    def minibatch(self) -> int:
        return self.batch or self.mesh.replicas * self.microbatches * self.samples

    @property
    def idle_devices(self) -> int:
        """Available devices that it does not use."""
        used = self.mesh.replicas * self.num_devices
        return 0 if self.searched is None else self.searched.devices - used

    @property
    def step_seconds(self) -> float:
        return self.breakdown.total

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.minibatch / self.step_seconds

    @cached_property
    def timeline(self) -> Timeline:
        """The step as predicted, in seconds."""
        return simulate(self.schedule, self.costs, self.title)

    @property
    def title(self) -> str:
        """`zb-v on 8 devices, 32 microbatches of 4`, and other settings that are not the default."""
        parts = [f"{self.recipe} on {show_count(self.num_devices, 'device')}"]
        if self.mesh.replicas > 1:
            parts[0] = f"{self.mesh.replicas} x {parts[0]}"
        if self.stages_per_device > 1:
            parts.append(f"{self.stages_per_device} stages each")
        parts.append(f"{show_count(self.microbatches, 'microbatch')} of {self.samples}")
        for kind, words in (("stage", "remat"), ("layer", "remat layer by layer"), ("activations", "offload")):
            if some := (*self.remat, *self.offload).count(kind):
                parts.append(words if some == len(self.remat) else f"{words} of {some} of {len(self.remat)} stages")
        return ", ".join([*parts, "optimizer offloaded"] if self.offload_optimizer else parts)

    @property
    def how_good(self) -> str:
        """How much faster any other plan could be, and what was not tried; empty for a plan that was not searched."""
        searched = self.searched
        if searched is None:
            return ""
        gap = math.ceil(1000 * searched.gap - 1e-6) / 10 if searched.gap > 1e-6 else 0.0  # never less than it is
        known = f"no plan of these kinds can be more than {gap:.1f}% faster"
        said = [f"{searched.tried} choices were tried; {known}" if gap else f"{known}: it is the best"]
        if searched.cut_short:
            said.append(
                f"the search was cut short by the time limit, with {searched.untried} choices not tried: more time may "
                "find a better plan, and another machine may find another"
            )
        elif searched.untried:
            said.append(f"{searched.untried} choices were not tried, since the search has a budget")
        if self.idle_devices:
            plural = "s stay" if self.idle_devices > 1 else " stays"
            said.append(f"{self.idle_devices} device{plural} idle: no plan found for all devices is as fast")
        return "; ".join(said)

    def __str__(self) -> str:
        fullest = max(range(self.num_devices), key=lambda device: self.memory[device].total)
        limit = self.limits[fullest]
        room = "" if limit is None else f" of {show_bytes(limit)}"
        away = max(self.timeline.host_peak) if self.schedule.has_copies else 0
        lines = [
            f"{self.title}: {show_seconds(self.step_seconds)} a step, {self.throughput:.4g} samples/s",
            f"layers per stage: {','.join(map(str, self.partition))}",
            f"the fullest device holds {show_bytes(self.memory[fullest].total)}{room}",
            f"a device has up to {show_bytes(float(away))} in its host's memory" if away else "",
            self.how_good,
            f"caution: {self.caution}" if self.caution else "",
        ]
        return "\n".join(filter(None, lines))

    # -- the JSON form ------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "devices": self.num_devices,
            "replicas": self.mesh.replicas,
            "replicas_inside": self.mesh.inside,
            **({"order": list(self.mesh.order)} if self.mesh.order else {}),
            "microbatches": self.microbatches,
            "samples": self.samples,
            "minibatch": self.minibatch,
            "partition": list(self.partition),
            **({} if self.cuts is None else {"cuts": self.cuts.to_json()}),
            **({"caution": self.caution} if self.caution else {}),
            "remat": list(self.remat),
            **({"offload_optimizer": True} if self.offload_optimizer else {}),
            "step_seconds": self.step_seconds,
            **({} if self.searched is None else {"searched": asdict(self.searched)}),
            "breakdown": asdict(self.breakdown),
            "memory": [asdict(held) for held in self.memory],
            "limits": list(self.limits),
            "costs": {key: value for key, value in asdict(self.costs).items() if value is not None},
            "schedule": self.schedule.to_json(),
        }

    @classmethod
    def from_json(cls, data: Any) -> "Plan":
        try:
            return cls(
                recipe=printable(str(data["recipe"])),
                schedule=Schedule.parse(json.dumps(data["schedule"])),
                partition=tuple(map(int, data["partition"])),
                remat=tuple(_REMAT.get(word, "none") for word in data["remat"]),
                samples=int(data["samples"]),
                mesh=_mesh(data),
                costs=Costs(**data["costs"]),
                breakdown=Breakdown(**data["breakdown"]),
                memory=tuple(Footprint(**held) for held in data["memory"]),
                limits=tuple(None if limit is None else int(limit) for limit in data["limits"]),
                cuts=GraphCuts.from_json(data["cuts"]) if "cuts" in data else None,
                caution=printable(str(data.get("caution", ""))),
                offload_optimizer=bool(data.get("offload_optimizer", False)),
                batch=_batch(data),
                searched=_searched(data),
            )
        except GaplessError as error:
            raise ConfigError(f"this is not a plan: {error}") from None
        except (KeyError, TypeError, ValueError) as error:
            missing = f"it has no {error}" if isinstance(error, KeyError) else str(error)[:120]
            raise ConfigError(f"this is not a plan: {missing}") from None

    def text(self) -> str:
        """The text of a plan file."""
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in self.to_json().items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def write(self, path: str | Path) -> None:
        Path(path).write_text(self.text(), encoding="utf-8", newline="\n")

    @classmethod
    def read(cls, path: str | Path) -> "Plan":
        return read_user_file(path, cls._parsed, "a plan", "is a JSON file", largest=256 * 2**20)

    @classmethod
    def _parsed(cls, text: str) -> "Plan":
        try:
            return cls.from_json(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise ConfigError(str(error)[:200]) from None


_REMAT: dict[str, Remat] = {"none": "none", "stage": "stage", "layer": "layer"}


def _mesh(data: Any) -> Mesh:
    order = tuple(map(int, data.get("order", ())))
    mesh = Mesh(int(data["replicas"]), int(data["devices"]), bool(data["replicas_inside"]), order)
    if order and (len(set(order)) != mesh.replicas * mesh.num_devices or min(order) < 0):
        raise ConfigError(
            f"its order lists {list(order)[:8]}, but it has {show_count(mesh.replicas * mesh.num_devices, 'device')}"
        )
    return mesh


def _searched(data: Any) -> Searched | None:
    if "searched" not in data:
        return None
    found = Searched(**data["searched"])
    numbers = (found.gap, found.tried, found.untried, found.devices)
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise ConfigError(f"what it says under searched is {data['searched']!r:.80}, but these are numbers")
    if max(data.get("order", [0])) >= found.devices:
        raise ConfigError(
            f"its order has device {max(data['order'])}, but it was made for {show_count(found.devices, 'device')}"
        )
    return found


def _batch(data: Any) -> int | None:
    """Only where microbatches do not divide it."""
    whole = int(data["replicas"]) * int(data["microbatches"]) * int(data["samples"])
    given = int(data.get("minibatch", whole))
    return None if given == whole else given
