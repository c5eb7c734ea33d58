"""Choices tried one after another: which are worth it, what became of each, and what none of them can be below."""

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gapless.errors import GaplessError
from gapless.plan.plan import Plan, Searched
from gapless.plan.profile.machine import Mesh
from gapless.plan.search import choices as options
from gapless.plan.search.choices import Choice
from gapless.plan.search.drafts import Drafts, TooLargeError
from gapless.plan.search.judge import Judge
from gapless.plan.search.refine import refined
from gapless.plan.search.search_options import SearchOptions
from gapless.units import show_seconds

_HOPELESS = 1.1  # times the best step: other cuts have not been seen to gain more
_REFINED = 3  # of the best, each of another recipe
_MOST_ACTIONS = 2_000_000  # of a schedule that is tried; fewer where making it takes longer than simulating it
_SLOWER = {"auto": 80, "v-half": 10, "v-min": 10}
_BUDGET = 12_000_000  # actions that are simulated for one choice of devices
_QUICK = 6_000  # actions of a choice that is tried first, so that there is something to compare with
_FIRST = 8  # of these
_NEAREST = 4  # choices that tell how much too small all devices together are


class Rejection(NamedTuple):
    """A choice that is no plan, and why."""

    choice: Choice
    reason: str


class Attempts:
    """Keeps what was found and what was rejected.

    Every machine, which is a choice of devices, has a budget of its own, and what is tried of it depends on nothing but
    itself: a choice is left out only where it can't be better than what was found. So a machine with more devices finds
    all that one with fewer finds.
    """

    def __init__(
        self,
        drafts: Drafts,
        wanted: SearchOptions,
        minibatch: int,
        progress: Callable[[str], None],
        found: Sequence[tuple[Choice, Plan]] = (),
    ) -> None:
        """`found`: what is there before."""
        self.judge, self.wanted, self.minibatch, self.progress = Judge(drafts), wanted, minibatch, progress
        self.microbatches, self.time_limit = wanted.microbatches, wanted.time_limit
        self.recipes = (*options.RECIPES, "auto") if wanted.schedules is None else tuple(wanted.schedules)
        self.deadline = None if self.time_limit is None else time.monotonic() + self.time_limit
        self.found = list(found)
        self.best = min((plan for _, plan in found), key=_value, default=None)
        self.rejected: list[Rejection] = []
        self.too_large: dict[tuple[str, int, Mesh], Choice] = {}  # the smallest microbatches that did not fit
        self.hopeless: list[Choice] = []  # what can't fit, however it is cut and recomputed
        self.missed: list[tuple[float, Rejection]] = []  # what does not fit, and what it needs for each byte there is
        self.least = math.inf  # what no plan can be below, of all choices that may fit
        self.tried = self.untried = 0
        self.cut_short = False

    @property
    def step(self) -> float:
        """That of the best plan so far."""
        return math.inf if self.best is None else self.best.step_seconds

    def out_of_time(self) -> bool:
        """Asked where there is more to do, so the search is cut short where it is."""
        over = self.deadline is not None and time.monotonic() > self.deadline
        self.cut_short = self.cut_short or over
        return over

    def try_all(self) -> None:
        """On all machines there are."""
        wanted, least, there = self.wanted, self.judge.least, self.judge.drafts.devices
        everything = tuple(range(len(there)))
        if not wanted.mesh and not options.every_machine(there):
            self.least = least.on(everything, self.minibatch)
        for machine in [everything] if wanted.mesh else options.machines(there):
            # Busy all the time it would be no quicker than the best so far; of one device it is always told what it
            # takes.
            if len(machine) > 1 and least.on(machine, self.minibatch) >= self.step:
                continue
            if not wanted.mesh and not options.every_order(machine, there):
                self.least = min(self.least, least.on(machine, self.minibatch))
            links = self.judge.drafts.profile(1).links
            meshes = options.meshes(machine, there, replicas=wanted.replicas, links=links)
            self._try_machine([wanted.mesh] if wanted.mesh else meshes)

    def _try_machine(self, meshes: Sequence[Mesh]) -> None:
        counts = {mesh: options.microbatches(mesh, self.minibatch, self.microbatches) for mesh in meshes}
        asked = {
            choice: self.judge.least.estimate(choice)
            for choice in options.choices(counts, self.recipes, len(self.judge.drafts.profile(1).layers))
        }
        ranked = sorted(asked, key=lambda choice: (asked[choice], choice.num_actions))  # of equals the first stays
        quick = [choice for choice in ranked if choice.recipe == "1f1b" and choice.num_actions <= _QUICK][:_FIRST]
        until = self.judge.drafts.effort + _BUDGET
        here: list[tuple[Choice, Plan]] = []
        for number, choice in enumerate(dict.fromkeys((*quick, *ranked))):
            said = f"best {show_seconds(self.step)}" if self.best else "nothing fits yet"
            self.progress(f"{number}/{len(ranked)} choices, {said}")
            best_here = min((plan.step_seconds for _, plan in here), default=math.inf)
            if (plan := self._tried(choice, until, best_here)) is not None:
                here.append((choice, plan))
        self._refine(here)

    def _tried(self, choice: Choice, until: int, best_here: float) -> Plan | None:
        """What is made of a choice, if it may be the best; everything else is rejected, with the reason. Where not all
        cuts are looked at, those of one recipe are held against the best of these devices: what is behind the best of
        all may be ahead once it is refined.
        """
        least = self.judge.least.seconds(choice, self.step)
        if least == math.inf:
            self.hopeless.append(choice)
            self._reject(
                choice, "too large: its devices together have less than parameters, gradients and optimizer state need"
            )
            return None
        if self._is_slower(choice, least):
            return None
        over = self.out_of_time()
        if (over and self.tried) or (self.judge.drafts.effort > until and self.found):
            why = f"the time limit of {self.time_limit:g} s was over" if over else "the budget of the search was spent"
            self._leave_untried(choice, least, f"not tried: {why}")
            return None
        most = _MOST_ACTIONS // _SLOWER.get(choice.recipe, 1)
        if choice.num_actions > most:
            why = f"it has about {choice.num_actions:,} actions, and more than {most:,} take too long"
            self._leave_untried(choice, least, why)
            return None
        least = max(least, self.judge.least.in_order(choice))
        if self._is_slower(choice, least):
            return None
        self.tried += 1
        refinable = choice.recipe != "auto" and not self.judge.few_cuts(choice)
        plan = self._judged(choice, min(best_here, _HOPELESS * self.step) if refinable else self.step)
        # Where nothing of it fits for certain, since one device has no other cuts, it is no bound.
        if plan is not None or choice.mesh.num_devices > 1:
            self.least = min(self.least, least)
        return plan

    def _leave_untried(self, choice: Choice, least: float, reason: str) -> None:
        self.least = min(self.least, least)
        self.untried += 1
        self._reject(choice, reason)

    def _is_slower(self, choice: Choice, least: float) -> bool:
        """Whether it is rejected since it can't be below the best so far."""
        if least >= self.step:
            self._reject(choice, f"it takes at least {show_seconds(least)}, however it is cut and ordered")
        return least >= self.step

    def try_nearest(self) -> None:
        """Of what is too large for its devices together, to tell by how much."""
        ranked = sorted(self.hopeless, key=lambda each: (-each.mesh.num_devices, each.samples, each.num_actions))
        for choice in ranked[:_NEAREST]:
            self._judged(choice)

    def _judged(self, choice: Choice, best: float = math.inf) -> Plan | None:
        kind = (choice.recipe, choice.stages_per_device, choice.mesh)
        smaller = self.too_large.get(kind)
        if smaller is not None and choice.samples >= smaller.samples and choice.share >= smaller.share:
            self._reject(choice, f"too large even with microbatches of {smaller.samples}")
            return None
        try:
            plan = self.judge.plan(choice, best)
        except TooLargeError as error:
            self._reject(choice, str(error))
            if best == math.inf:  # otherwise what is too slow was not looked at
                self.too_large[kind] = choice
            self.missed.append((error.excess, self.rejected[-1]))
            return None
        except GaplessError as error:
            self._reject(choice, str(error))
            return None
        self._add(choice, plan)
        return plan

    def _add(self, choice: Choice, plan: Plan) -> None:
        self.found.append((choice, plan))
        if self.best is None or _value(plan) < _value(self.best):
            self.best = plan

    def _reject(self, choice: Choice, reason: str) -> None:
        self.rejected.append(Rejection(choice, reason))

    def _refine(self, here: Sequence[tuple[Choice, Plan]]) -> None:
        """The best of this machine, each of another recipe; all cuts of those with few were looked at."""
        seen: set[str] = set()
        ranked = sorted(here, key=lambda pair: _value(pair[1]))
        for choice, plan in ranked:
            if plan.step_seconds > _HOPELESS * ranked[0][1].step_seconds:
                break
            if self.judge.least.seconds(choice, self.step) >= self.step:
                continue
            if choice.recipe not in seen and len(seen) < _REFINED:
                seen.add(choice.recipe)
                if self.judge.few_cuts(choice) or self.out_of_time():
                    continue
                better = refined(self.judge, choice, plan, self.out_of_time)
                if better is not plan:
                    self.found.remove((choice, plan))
                    self._add(choice, better)

    def ranked(self) -> list[tuple[Choice, Plan]]:
        return sorted(self.found, key=lambda pair: _value(pair[1]))

    def searched(self, devices: int) -> Searched:
        gap = 1 - min(self.least, self.step) / self.step if self.step else 0.0
        return Searched(gap, self.untried == 0, self.cut_short, self.tried, self.untried, devices)


def _value(plan: Plan) -> tuple[float, int, int]:
    """Less is better: the step, then what the fullest device holds, then the number of actions."""
    fullest = max(held.total for held in plan.memory)
    return float(f"{plan.step_seconds:.9g}"), fullest, plan.schedule.num_actions
