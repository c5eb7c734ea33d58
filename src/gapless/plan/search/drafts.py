"""A draft: a choice with its cuts, its schedule, and what each device would hold.

Not yet lowered and not yet judged, so that many can be made to find one that fits.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

from gapless.errors import PlanError, ScheduleError
from gapless.plan.cut.partition import partition
from gapless.plan.cut.stage_costs import Stages, make_stages
from gapless.plan.plan import Footprint
from gapless.plan.profile.contention import Contention
from gapless.plan.profile.machine import Device
from gapless.plan.profile.profile import Layer, Profile
from gapless.plan.search.bound import Bounds
from gapless.plan.search.choices import Choice
from gapless.plan.search.footprint import footprints, over_limit
from gapless.schedule.action import Schedule
from gapless.schedule.lower import Passes, lowered
from gapless.schedule.recipes import make_schedule
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline
from gapless.units import show_bytes

_TRIES = 60  # to share a device's memory among its stages
_MESSAGES = 6  # that `auto` leaves room for: a device has two neighbours, and messages go both ways


class TooLargeError(PlanError):
    """What does not fit, and by how much: the largest need of a device for each byte that it has."""

    def __init__(self, message: str, excess: float) -> None:
        super().__init__(message)
        self.excess = excess


@dataclass(frozen=True)
class Draft:
    """`remat` are the stages that are recomputed, `timeline` is of `plain` with these recomputes."""

    choice: Choice
    counts: tuple[int, ...]
    remat: frozenset[int]
    stages: Stages
    plain: Schedule
    timeline: Timeline
    held: tuple[Footprint, ...]

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule

    @property
    def seconds(self) -> float:
        return float(self.timeline.makespan)


class Drafts:
    """Makes drafts of a profile for these devices, and keeps what several of them share."""

    def __init__(
        self, profile: Profile, devices: Sequence[Device], *, shard_optimizer: bool = False, slack: float | None = None
    ) -> None:
        self.devices, self.shard_optimizer = devices, shard_optimizer
        self.slack = profile.slack if slack is None else slack
        self.profile = cache(profile.scaled)  # by the samples in a microbatch
        self._bounds = cache(lambda samples: Bounds(self.profile(samples)))
        self._named = cache(make_schedule)
        self._plain: dict[tuple[Choice, tuple[int, ...]], Schedule] = {}

    def make(self, choice: Choice, counts: tuple[int, ...], remat: frozenset[int] = frozenset()) -> Draft:
        profile = self.profile(choice.samples)
        stages = make_stages(profile, counts, choice.placement, choice.mesh, self.speeds(choice))
        if (choice, counts) not in self._plain:
            self._plain[choice, counts] = self._schedule(choice, stages)
        plain = self._plain[choice, counts]
        schedule = lowered(plain, stages.costs, Passes(recompute=remat, early=False))
        stages = replace(stages, costs=_contention(profile, choice.mesh.replicas).costs(stages.costs, schedule))
        timeline = simulate(schedule, stages.costs)
        return Draft(choice, counts, remat, stages, plain, timeline, self.held(choice, stages, timeline))

    def held(self, choice: Choice, stages: Stages, timeline: Timeline) -> tuple[Footprint, ...]:
        profile = self.profile(choice.samples)
        return footprints(profile, stages, timeline, optimizer_shards=self.shards(choice), slack=self.slack)

    def _schedule(self, choice: Choice, stages: Stages) -> Schedule:
        sizes: dict[str, Any] = {"devices": choice.mesh.num_devices, "microbatches": choice.microbatches}
        sizes["stages_per_device"] = choice.stages_per_device
        if choice.recipe not in ("auto", "v-half", "v-min"):
            return self._named(choice.recipe, **sizes)
        room = self._room(choice, stages) if choice.recipe == "auto" else None
        try:
            return make_schedule(choice.recipe, costs=stages.costs, memory_limit=room, **sizes)
        except ScheduleError:
            left = show_bytes(room or 0)
            raise PlanError(f"no order was found that keeps within the {left} left for activations") from None

    def _room(self, choice: Choice, stages: Stages) -> float | None:
        """What is left for activations on the device with the least room; None without a limit."""
        profile = self.profile(choice.samples)
        activation = stages.costs.per_stage("activation", choice.placement)
        found: list[float] = []
        for device, limit in enumerate(self.limits(choice)):
            if limit is None:
                continue
            own, held = stages.of_device(device), choice.placement.stages[device]
            others = profile.reserved + max(layer.libraries for layer in own)
            fixed = others + sum(kept(layer, self.shards(choice)) for layer in own)
            messages = _MESSAGES * max(stages.boundary[stage] for stage in held)
            beside = messages + max(layer.most_workspace for layer in own)
            least = fixed + (1 + self.slack) * (beside + float(sum(activation[stage] for stage in held)))
            if least > limit:
                raise TooLargeError(
                    f"device {device} needs {show_bytes(least)} for a single microbatch, but has {show_bytes(limit)}",
                    least / limit,
                )
            found.append((limit - fixed) / (1 + self.slack) - beside)
        return min(found, default=None)

    def cut(
        self,
        choice: Choice,
        remat: Collection[int],
        memory: Sequence[Sequence[float]] | None = None,
        limits: Sequence[float] | None = None,
    ) -> tuple[int, ...]:
        profile = self.profile(choice.samples)
        placement = choice.placement
        plain = [layer.work for layer in profile.layers]
        again = [layer.work + layer.recompute.median for layer in profile.layers]
        homes = placement.homes
        links = [choice.mesh.hop(profile, *pair) for pair in pairwise((*homes, homes[-1]))]
        hops = [[link.seconds(layer.boundary) for layer in profile.layers] for link in links]
        return partition(
            [again if stage in remat else plain for stage in range(placement.num_stages)],
            placement,
            speeds=self.speeds(choice),
            hops=hops if profile.links else None,
            memory=memory,
            limits=limits,
            most_tries=_TRIES,
        )

    def least_seconds(self, choice: Choice) -> float:
        """What no plan of this choice can be below."""
        bounds, speeds = self._bounds(choice.samples), self.speeds(choice)
        return bounds.seconds(choice.recipe, choice.stages_per_device, choice.mesh, choice.microbatches, speeds)

    def fits(self, draft: Draft) -> bool:
        return not over_limit(draft.held, self.limits(draft.choice))

    def excess(self, draft: Draft) -> float:
        """The largest need of a device, as a share of what it has."""
        pairs = zip(draft.held, self.limits(draft.choice), strict=True)
        return max(held.total / limit for held, limit in pairs if limit is not None)

    def shards(self, choice: Choice) -> int:
        return choice.mesh.replicas if self.shard_optimizer else 1

    def limits(self, choice: Choice) -> list[int | None]:
        return [device.memory for device in self.devices[: choice.mesh.num_devices]]

    def speeds(self, choice: Choice) -> list[float]:
        return [device.speed for device in self.devices[: choice.mesh.num_devices]]


def _contention(profile: Profile, replicas: int) -> Contention:
    """That of one pipeline: replicas take turns with it, too."""
    found = profile.contention
    return found if found.at_once is None else replace(found, at_once=found.at_once / replicas)


def kept(layer: Layer, shards: int) -> float:
    """The bytes that are there from the first step to the last."""
    return layer.parameters + layer.gradients + layer.optimizer_state / shards
