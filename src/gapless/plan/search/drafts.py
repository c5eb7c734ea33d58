"""A draft: a choice with its cuts, its schedule, and what each device would hold.

Not yet lowered and not yet judged, so that many can be made to find one that fits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from gapless.errors import PlanError
from gapless.plan.cut.partition import partition
from gapless.plan.cut.stage_costs import Stages, make_stages
from gapless.plan.plan import Remat
from gapless.plan.predict.breakdown import step_seconds
from gapless.plan.predict.footprint import Footprint, footprints, levels, over_limit
from gapless.plan.profile.machine import Device, Mesh
from gapless.plan.profile.profile import Profile
from gapless.plan.search.auto_order import auto_order, rebuilt
from gapless.plan.search.choices import Choice
from gapless.plan.search.search_options import ANYTHING, SearchOptions
from gapless.schedule.action import Schedule
from gapless.schedule.lower import Passes, lowered
from gapless.schedule.lower.offload import relieved
from gapless.schedule.memory import peaks
from gapless.schedule.recipes import make_schedule
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline
from gapless.units import show_bytes

_TRIES = 60, 16  # to share a device's memory among its stages, of which there are few, or many
_FEW_STAGES = 16
_MESSAGES = 6  # that `auto` leaves room for: a device has two neighbours, and messages go both ways
_WEIGHT = {"auto": 40, "v-half": 8, "v-min": 8}  # what making a schedule takes, in simulations of it

Modes = tuple[Remat, ...]


class TooLargeError(PlanError):
    """What does not fit, and by how much: the largest need of a device for each byte that it has."""

    def __init__(self, message: str, excess: float) -> None:
        super().__init__(message)
        self.excess = excess


class TooSlowError(PlanError):
    """What can't be quicker than the best so far."""


@dataclass(frozen=True)
class Draft:
    """`schedule` is `plain` with the recomputes of `remat`, of which there is one word per stage; `alone` are the
    stages as they are without other devices beside them. What takes long to know is found when it is asked for.
    """

    choice: Choice
    counts: tuple[int, ...]
    remat: Modes
    alone: Stages
    plain: Schedule
    schedule: Schedule
    _drafts: "Drafts"

    @cached_property
    def stages(self) -> Stages:
        """As they are beside each other."""
        slower = self._drafts.profile(self.choice.samples).contention
        return replace(self.alone, costs=slower.costs(self.alone.costs, self.schedule, self.choice.mesh.replicas))

    @cached_property
    def timeline(self) -> Timeline:
        self._drafts.effort += self.schedule.num_actions
        return simulate(self.schedule, self.stages.costs)

    @cached_property
    def fitted(self) -> "Fitted":
        """Asked for only where there is a limit, or a plan is made of it."""
        return self._drafts.fitted(self.choice, self.stages, self.timeline)

    @property
    def held(self) -> tuple[Footprint, ...]:
        return self.fitted.held

    @cached_property
    def seconds(self) -> float:
        """Of a step, with what comes behind the last action."""
        profile = self._drafts.profile(self.choice.samples)
        return step_seconds(profile, self.stages, self.timeline, self.choice.mesh)


class Fitted(NamedTuple):
    """A step as it would run, with what leaves for the host's memory; and what each device holds."""

    timeline: Timeline
    held: tuple[Footprint, ...]


class Drafts:
    """Makes drafts of a profile for these devices, and keeps what several of them share. `effort` counts the actions
    that were simulated: what the search's budget is spent on, and the same on every machine.
    """

    def __init__(
        self,
        profile: Profile,
        devices: Sequence[Device],
        options: SearchOptions = ANYTHING,
        minibatch: int | None = None,
    ) -> None:
        """`minibatch`: samples in a step, where microbatches may not divide them."""
        self.devices, self.minibatch, self._options = devices, minibatch, options
        self.slack = profile.slack if options.slack is None else options.slack
        self.host = profile.host if options.offload in ("activations", "both") else None
        self.offloads_optimizer = options.offload in ("optimizer", "both")
        profile = profile.with_offloaded_optimizer() if self.offloads_optimizer else profile
        profile = profile.with_step_copies() if options.overlap else profile
        self.again = options.remat
        self.effort = 0
        self.profile = cache(replace(profile, host=self.host).scaled)  # by the samples in a microbatch
        self._named = cache(make_schedule)
        self._on = cache(self._positions)
        self._plain: dict[tuple[Choice, tuple[int, ...], tuple[Any, ...]], Schedule] = {}
        self._cuts: dict[Any, tuple[int, ...]] = {}

    def make(self, choice: Choice, counts: tuple[int, ...], remat: Modes | None = None, *, free: bool = False) -> Draft:
        """`free`: an order that `auto` makes need not keep within the memory, since what is too much may leave."""
        modes = nothing_again(len(counts)) if remat is None else remat
        profile = self.profile(choice.samples)
        stages = make_stages(profile, counts, choice.placement, choice.mesh, self.speeds(choice), modes)
        plain = self._ordered(choice, counts, stages, modes, free)
        again = [stage for stage, mode in enumerate(modes) if mode == "stage"]
        schedule = lowered(plain, stages.costs, Passes(recompute=again, early=False)) if again else plain
        return Draft(choice, counts, modes, stages, plain, schedule, self)

    def fitted(self, choice: Choice, stages: Stages, timeline: Timeline) -> Fitted:
        """As it is, if it fits; or with as little offloaded as each device needs to fit, if it may be."""
        held = self._held(choice, stages, timeline)
        if self.host is None or not over_limit(held, self.limits(choice)):
            return Fitted(timeline, held)
        grown = 1 + self.slack
        rooms = [
            math.inf if limit is None else (limit - each.fixed) / grown - 1
            for each, limit in zip(held, self.limits(choice), strict=True)
        ]
        made = relieved(timeline, rooms, levels(timeline, stages), host_memory=self.host.memory)
        if not made.has_copies:
            return Fitted(timeline, held)
        self.effort += 4 * made.num_actions
        after = simulate(made, stages.costs)
        return Fitted(after, self._held(choice, stages, after))

    def _held(self, choice: Choice, stages: Stages, timeline: Timeline) -> tuple[Footprint, ...]:
        profile = self.profile(choice.samples)
        self.effort += timeline.schedule.num_actions
        return footprints(profile, stages, timeline, optimizer_shards=self.shards(choice), slack=self.slack)

    def fixed_order(self, choice: Choice) -> Schedule | None:
        """Its order, if no cost changes it."""
        return None if choice.recipe in _WEIGHT else self._named(choice.recipe, **choice.sizes)

    def _ordered(self, choice: Choice, counts: tuple[int, ...], stages: Stages, modes: Modes, free: bool) -> Schedule:
        if (fixed := self.fixed_order(choice)) is not None:
            return fixed
        # The orders of vees depend on times, which recomputes inside backwards change.
        key = (choice, counts, (*modes, free) if choice.recipe == "auto" else tuple(mode == "layer" for mode in modes))
        if key not in self._plain:
            self.effort += self.weight(choice)
            if choice.recipe == "auto":
                rooms = [None] * choice.mesh.num_devices if free else self._rooms(choice, stages)
                self._plain[key] = auto_order(stages, rooms, choice.sizes)
            else:
                self._plain[key] = make_schedule(choice.recipe, costs=stages.costs, **choice.sizes)
        return self._plain[key]

    def weight(self, choice: Choice) -> int:
        """What it takes to make its schedule for other cuts."""
        return _WEIGHT.get(choice.recipe, 0) * choice.num_actions

    def _rooms(self, choice: Choice, stages: Stages) -> list[float | None]:
        """What is left for activations on each device; None without a limit."""
        profile = self.profile(choice.samples)
        kept_ = stages.costs.per_stage("activation", choice.placement)
        found: list[float | None] = []
        for device, limit in enumerate(self.limits(choice)):
            if limit is None:
                found.append(None)
                continue
            own, held = stages.of_device(device), choice.placement.stages[device]
            others = profile.reserved + max(layer.libraries for layer in own)
            fixed = others + sum(layer.kept(self.shards(choice)) for layer in own)
            messages = _MESSAGES * max(stages.boundary[stage] for stage in held)
            beside = messages + max(layer.most_workspace for layer in own) + rebuilt(stages, held)
            sizes = [stages.boundary[s] if stages.remat[s] == "stage" else float(kept_[s]) for s in held]
            least = fixed + (1 + self.slack) * (beside + sum(sizes))
            if least > limit:
                raise TooLargeError(
                    f"device {device} needs {show_bytes(least)} for a single microbatch, but has {show_bytes(limit)}",
                    least / limit,
                )
            found.append((limit - fixed) / (1 + self.slack) - beside)
        return found

    def cut(
        self,
        choice: Choice,
        remat: Modes | None = None,
        memory: Sequence[Sequence[float]] | None = None,
        limits: Sequence[float] | None = None,
    ) -> tuple[int, ...]:
        key = (choice.samples, choice.placement, choice.mesh, remat)
        if memory is None and key in self._cuts:
            return self._cuts[key]
        profile = self.profile(choice.samples)
        placement = choice.placement
        plain = [layer.work for layer in profile.layers]
        again = [layer.work + layer.recompute.median for layer in profile.layers]
        homes = placement.homes
        links = [choice.mesh.hop(profile, *pair) for pair in pairwise((*homes, homes[-1]))]
        hops = [[link.seconds(layer.boundary) for layer in profile.layers] for link in links]
        found = partition(
            [again if remat and remat[stage] != "none" else plain for stage in range(placement.num_stages)],
            placement,
            speeds=self.speeds(choice),
            hops=hops if profile.links else None,
            memory=memory,
            limits=limits,
            most_tries=_TRIES[placement.num_stages > _FEW_STAGES],
        )
        if memory is None:
            self._cuts[key] = found
        return found

    def fits(self, draft: Draft) -> bool:
        return not self.too_full(draft)

    def too_full(self, draft: Draft) -> dict[int, float]:
        """The devices that hold more than they have, and how much more. What is sure comes first: that is quick."""
        limits, shards = self.limits(draft.choice), self.shards(draft.choice)
        if all(limit is None for limit in limits):
            return {}
        self.effort += draft.schedule.num_actions
        surely = {}
        sure = peaks(draft.schedule, draft.alone.memory_costs) if self.host is None else [0] * len(limits)
        pairs = zip(sure, limits, strict=True)
        for device, (peak, limit) in enumerate(pairs):
            kept = sum(layer.kept(shards) for layer in draft.alone.of_device(device))
            held = self.profile(draft.choice.samples).reserved + kept + (1 + self.slack) * float(peak)
            if limit is not None and held > limit:
                surely[device] = held - limit
        full = over_limit(draft.held, limits) if not surely else []
        return surely or {device: draft.held[device].total - float(limits[device] or 0) for device in full}

    def excess(self, draft: Draft) -> float:
        """The largest need of a device, as a share of what it has."""
        pairs = zip(draft.held, self.limits(draft.choice), strict=True)
        return max(held.total / limit for held, limit in pairs if limit is not None)

    def shards(self, choice: Choice) -> int:
        return choice.mesh.replicas if self._options.shard_optimizer else 1

    def limits(self, choice: Choice) -> tuple[int | None, ...]:
        """Of each position of a pipeline: that of its replica with the least."""
        return self._on(choice.mesh)[0]

    def speeds(self, choice: Choice) -> tuple[float, ...]:
        """Of each position of a pipeline: that of its slowest replica."""
        return self._on(choice.mesh)[1]

    def _positions(self, mesh: Mesh) -> tuple[tuple[int | None, ...], tuple[float, ...]]:
        limits: list[int | None] = []
        speeds = []
        for position in range(mesh.num_devices):
            own = [self.devices[mesh.device(replica, position)] for replica in range(mesh.replicas)]
            limits.append(min((device.memory for device in own if device.memory is not None), default=None))
            speeds.append(min(device.speed for device in own))
        return tuple(limits), tuple(speeds)


def nothing_again(num_stages: int) -> Modes:
    """Nothing is recomputed."""
    nothing: Remat = "none"
    return (nothing,) * num_stages
