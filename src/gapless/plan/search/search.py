"""Which pipelines, which schedule, how many microbatches, what to recompute: all of it tried, judged by the simulator
under the memory limit, and told.

The answer does not depend on chance, nor on the clock unless the time limit cuts the search short.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from gapless.errors import ConfigError, GaplessError, PlanError
from gapless.plan.explain import explained
from gapless.plan.plan import Plan
from gapless.plan.profile.machine import Device, Mesh, check_devices, check_reach
from gapless.plan.profile.profile import Profile
from gapless.plan.search import choices as options
from gapless.plan.search.choices import Choice
from gapless.plan.search.drafts import Drafts, TooLargeError
from gapless.plan.search.judge import Judge
from gapless.plan.search.refine import refined
from gapless.plan.search.wanted import ANYTHING, Wanted
from gapless.units import show_bytes, show_seconds

_REFINED = 3  # of the best, each of another recipe
_MOST_ACTIONS = 2_000_000  # of a schedule that is tried; fewer where making it takes as long as simulating it
_AUTO = 3  # places at which `auto` is tried


class Rejection(NamedTuple):
    """A choice that is no plan, and why."""

    choice: Choice
    reason: str


@dataclass(frozen=True)
class Found:
    """All plans, the quickest first; all that was rejected; and in two sentences why the first is the first."""

    plans: tuple[Plan, ...]
    rejected: tuple[Rejection, ...]
    explanation: str
    complete: bool  # False where the time limit ended the search

    @property
    def best(self) -> Plan:
        return self.plans[0]


def search(
    profile: Profile,
    devices: int | Sequence[Device],
    wanted: Wanted = ANYTHING,
    minibatch: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Found:
    """The best plan for a profile on these devices.

    minibatch  samples in a step; by default the profile's, or 4 of its microbatches per device
    """
    there = [Device()] * _at_least_one("devices", devices) if isinstance(devices, int) else list(devices)
    check_devices(there)
    if minibatch is None:
        minibatch = profile.minibatch or 4 * len(there) * profile.samples
    _at_least_one("minibatch", minibatch)
    if wanted.microbatches is not None and _at_least_one("microbatches", wanted.microbatches) > minibatch:
        raise ConfigError(
            f"a minibatch of {minibatch} samples can't be cut into {wanted.microbatches} microbatches: use fewer"
        )
    check_reach(profile, len(there))
    _check_layers(profile, there)
    judge = Judge(Drafts(profile, there, shard_optimizer=wanted.shard_optimizer, slack=wanted.slack))
    tries = _Attempts(judge, wanted, minibatch, len(profile.layers), progress)
    even = wanted.replicas and len(set(there)) == 1
    meshes = options.meshes(len(there), even=even, levels=len(profile.links))
    tries.try_all([wanted.mesh] if wanted.mesh else meshes)
    if not tries.found and not tries.missed and not wanted.mesh:
        tries.try_all(options.shorter(len(there)))
    if not tries.found:
        raise PlanError(_why_none(tries, there, minibatch))
    tries.refine()
    plans = tuple(plan for _, plan in tries.ranked())
    text = explained(plans, len(tries.rejected))
    return Found(plans, tuple(tries.rejected), text, not tries.ended_early)


class _Attempts:
    """Keeps what was found and what was rejected."""

    def __init__(
        self, judge: Judge, wanted: Wanted, minibatch: int, num_layers: int, progress: Callable[[str], None]
    ) -> None:
        self.judge, self.minibatch, self.num_layers, self.progress = judge, minibatch, num_layers, progress
        self.microbatches, self.recipes, self.time_limit = wanted.microbatches, wanted.schedules, wanted.time_limit
        self.deadline = None if self.time_limit is None else time.monotonic() + self.time_limit
        self.found: list[tuple[Choice, Plan]] = []
        self.best: Plan | None = None
        self.rejected: list[Rejection] = []
        self.tried: set[Choice] = set()
        self.too_large: dict[tuple[str, int, Mesh], int] = {}  # the smallest microbatches that did not fit
        self.tight: dict[tuple[str, int, Mesh], int] = {}  # and those that did, if some stage is recomputed
        self.missed: list[tuple[float, Rejection]] = []  # what does not fit, and what it needs for each byte there is
        self.ended_early = False

    def out_of_time(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def try_all(self, meshes: Sequence[Mesh]) -> None:
        counts = {mesh: options.microbatches(mesh, self.minibatch, self.microbatches) for mesh in meshes}
        asked = options.RECIPES if self.recipes is None else [name for name in self.recipes if name != "auto"]
        self._try(options.choices(counts, asked, self.num_layers))
        while self.microbatches is None and (smaller := self._smaller()):
            self._try(smaller)
        if self.recipes is None or "auto" in self.recipes:
            self._try(self._auto(counts))

    def _smaller(self) -> list[Choice]:
        """What did not fit, or only with a recompute, with the next smaller microbatches, as long as there are any."""
        found = []
        for (recipe, stages_per_device, mesh), samples in self.tight.items():
            share = self.minibatch // mesh.replicas
            size = max((size for size in range(1, samples // 2 + 1) if share % size == 0), default=None)
            if size is not None and share // size <= options.MOST_MICROBATCHES:
                found.append(Choice(recipe, stages_per_device, mesh, share // size, size))
        return [choice for choice in found if choice not in self.tried]

    def _auto(self, counts: Mapping[Mesh, Sequence[tuple[int, int]]]) -> list[Choice]:
        """It takes as long as all others together: only where they do best, or come nearest, unless it is alone."""
        best = [choice for choice, _ in self.ranked()]
        best = best or [rejection.choice for _, rejection in sorted(self.missed, key=itemgetter(0))]
        there = [(choice.mesh, choice.microbatches, choice.samples) for choice in best if choice.mesh.num_devices > 1]
        places = list(dict.fromkeys(there))[:_AUTO]
        if places:
            counts = {mesh: [(M, size) for other, M, size in places if other == mesh] for mesh, _, _ in places}
        return [c for c in options.choices(counts, ["auto"], self.num_layers) if c.recipe == "auto"]

    def _try(self, asked: Iterable[Choice]) -> None:
        enough = [c for c in asked if c.mesh.num_devices * c.stages_per_device <= self.num_layers]
        choices = sorted(enough, key=self.judge.drafts.least_seconds)  # stable, so that equals stay in their order
        self.tried.update(choices)
        for number, choice in enumerate(choices):
            best = self.best
            said = f"best {show_seconds(best.step_seconds)}" if best else "nothing fits yet"
            self.progress(f"{number}/{len(choices)} choices, {said}")
            least = self.judge.drafts.least_seconds(choice)
            if self.out_of_time() and (self.found or self.rejected):
                self.ended_early = True
                self._reject(choice, f"not tried: the time limit of {self.time_limit:g} s was over")
            elif best is not None and least > best.step_seconds:
                self._reject(
                    choice,
                    f"it takes at least {show_seconds(least)}, however it is cut and ordered, and the best takes "
                    f"{show_seconds(best.step_seconds)}",
                )
            else:
                self._judge(choice)

    def _judge(self, choice: Choice) -> None:
        kind = (choice.recipe, choice.stages_per_device, choice.mesh)
        most = _MOST_ACTIONS if choice.recipe not in ("auto", "v-half", "v-min") else _MOST_ACTIONS // 20
        if choice.num_actions > most:
            self._reject(choice, f"it has about {choice.num_actions:,} actions, and more than {most:,} take too long")
            return
        smaller = self.too_large.get(kind, math.inf)
        if choice.samples >= smaller:
            self._reject(choice, f"too large even with microbatches of {smaller}")
            return
        try:
            plan = self.judge.plan(choice, self.best.step_seconds if self.best else math.inf)
            self.found.append((choice, plan))
            if "stage" in plan.remat:
                self.tight[kind] = min(choice.samples, self.tight.get(kind, choice.samples))
            if self.best is None or _value(plan) < _value(self.best):
                self.best = plan
        except TooLargeError as error:
            self._reject(choice, str(error))
            self.too_large[kind] = choice.samples
            self.tight[kind] = min(choice.samples, self.tight.get(kind, choice.samples))
            self.missed.append((error.excess, self.rejected[-1]))
        except GaplessError as error:
            self._reject(choice, str(error))

    def _reject(self, choice: Choice, reason: str) -> None:
        self.rejected.append(Rejection(choice, reason))

    def ranked(self) -> list[tuple[Choice, Plan]]:
        return sorted(self.found, key=lambda pair: _value(pair[1]))

    def refine(self) -> None:
        seen: set[str] = set()
        for choice, plan in self.ranked():
            if choice.recipe not in seen and len(seen) < _REFINED and not self.out_of_time():
                seen.add(choice.recipe)
                self.found.remove((choice, plan))
                self.found.append((choice, refined(self.judge, choice, plan, self.out_of_time)))


def _value(plan: Plan) -> tuple[float, int, int]:
    """Less is better: the step, then what the fullest device holds, then the number of actions."""
    fullest = max(held.total for held in plan.memory)
    return float(f"{plan.step_seconds:.9g}"), fullest, plan.schedule.num_actions


def _check_layers(profile: Profile, devices: Iterable[Device]) -> None:
    """A layer that no device can hold is said first: no choice would help."""
    memories = [device.memory for device in devices]
    most = max((memory for memory in memories if memory is not None), default=0)
    if None in memories:
        return
    for number, layer in enumerate(profile.layers):
        need = layer.parameters + layer.gradients + layer.optimizer_state + layer.libraries + profile.reserved
        if need > most:
            raise PlanError(
                f"layer {number} ({layer.name[:60]}) alone needs {show_bytes(need)} for its parameters "
                f"({show_bytes(layer.parameters)}), gradients and optimizer state, but the largest device has "
                f"{show_bytes(most)}: cut it into smaller layers, or use devices of at least {show_bytes(need)}"
            )


def _why_none(tries: _Attempts, devices: Sequence[Device], minibatch: int) -> str:
    cut_short = f" (cut short by the time limit of {tries.time_limit:g} s)" if tries.ended_early else ""
    if tries.missed:
        excess, (choice, reason) = min(tries.missed, key=itemgetter(0))
        most = max(device.memory or 0 for device in devices)
        return (
            f"nothing fits {show_bytes(most)} per device{cut_short}; the nearest is {choice}, where {reason}: about "
            f"{show_bytes(excess * most)} per device would do"
        )
    if tries.rejected:
        return f"no plan can be made: {tries.rejected[0].choice} is rejected because {tries.rejected[0].reason}"
    return (
        f"a minibatch of {minibatch} samples can't be shared out evenly among {len(devices)} devices as asked: use "
        f"{minibatch // len(devices) * len(devices) or len(devices)}, or another number of microbatches"
    )


def _at_least_one(word: str, value: int) -> int:
    if isinstance(value, bool) or value < 1:
        raise ConfigError(f"{word} is {value}, but a plan needs at least 1")
    return value
