"""From a choice to a plan: cut the model, build the schedule, see that it fits, and predict the step.

Where there are few ways to cut it, all that may be the quickest are tried. Else it is cut by time; what does not fit is
cut by memory too, or recomputed where that is needed, and the quickest of all is taken.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import product

from gapless.errors import GaplessError
from gapless.plan.cut.partition import every_cut, held_together
from gapless.plan.plan import Plan, Remat
from gapless.plan.predict.footprint import over_limit
from gapless.plan.predict.messages import sent
from gapless.plan.search.bounds.bound import CutBounds
from gapless.plan.search.bounds.lower_bounds import LowerBounds
from gapless.plan.search.choices import Choice
from gapless.plan.search.drafts import Draft, Drafts, Modes, TooLargeError, TooSlowError, nothing_again
from gapless.plan.search.finish import quickest
from gapless.plan.search.recomputes import in_flight_at_peak, recomputes
from gapless.units import show_bytes, show_seconds

_ROUNDS = 4  # of cutting by memory: cuts move what is held at the peak
_OVER = 1.1  # times what all devices have: no other cuts of several stages each fitted
_NEAR = 1.03  # times the best step: the other cuts of `auto` have not been seen to gain more
_FEW_CUTS = 1000  # ways to cut a model that are looked at one by one
_EFFORT = 60_000  # actions that are simulated for the cuts of one choice
_QUICK = 500_000  # what an order of `auto` may take where more than one is made
_SHARES = (0.25, 0.5, 0.75, 1.0)  # of the devices that `auto` recomputes on, those with the least room first


class Judge:
    """Turns choices into plans that fit."""

    def __init__(self, drafts: Drafts) -> None:
        self.drafts, self.least = drafts, LowerBounds(drafts)
        self._compositions = cache(lambda layers, stages: list(every_cut(layers, stages)))

    def plan(self, choice: Choice, best: float = math.inf) -> Plan:
        """Raises a GaplessError that says why there is none. What is far from the `best` step so far is not lowered
        with all the care that takes.
        """
        found, missed = self._by_time(choice, best)
        if self.few_cuts(choice):
            found += self._all_cuts(choice, min([best, *(draft.seconds for draft in found)]))
        if not found:
            raise missed or self._too_large(self.drafts.make(choice, self.drafts.cut(choice)))
        return quickest(self.drafts, found, best)

    def few_cuts(self, choice: Choice) -> bool:
        """Whether every way to cut the model is looked at."""
        layers = len(self.drafts.profile(choice.samples).layers)
        return math.comb(layers - 1, choice.placement.num_stages - 1) <= _FEW_CUTS

    # -- which cuts ---------------------------------------------------------------------------------------------------

    def _by_time(self, choice: Choice, best: float) -> tuple[list[Draft], GaplessError | None]:
        """The cuts that balance time; and where these do not fit as they are, others. Or why there are none."""
        counts = self.drafts.cut(choice)
        if choice.recipe == "auto":
            return self._orders(choice, counts, best)
        first = self.drafts.make(choice, counts)
        if self.drafts.fits(first):
            return [first], None
        drafts = self._cut_by_memory(first, best)
        try:
            made = self.fitted(choice, counts, best, first)
            return [*drafts, made, *self._cut_again(made, best)], None
        except TooSlowError as error:
            return drafts, error
        except TooLargeError as error:
            made_all = [made for again in self.drafts.again for made in self._all_recomputed(first, again, best)]
            fitting = [draft for draft in made_all if self.drafts.fits(draft)]
            if fitting or drafts or not made_all:
                return [*drafts, *fitting], error
            return [], self._too_large(min([first, *made_all], key=self.drafts.excess))

    def _orders(self, choice: Choice, counts: tuple[int, ...], best: float) -> tuple[list[Draft], GaplessError | None]:
        """What `auto` makes of these cuts; and in a vee with a limit of those where each device has a layer fewer on
        the way down and one more on the way up, since what comes later is held for a shorter time.
        """
        tried, K = [counts], choice.mesh.num_devices
        later = tuple(count + (1 if stage >= K else -1) for stage, count in enumerate(counts))
        quick = self.drafts.weight(choice) <= _QUICK
        if choice.stages_per_device == 2 and min(later) > 0 and quick and None not in self.drafts.limits(choice):
            tried.append(later)
        found: list[Draft] = []
        missed: GaplessError | None = None
        for each in tried:
            if found and (found[0].seconds > _NEAR * best or self.cut_bounds(choice).seconds(each) >= best):
                continue
            try:
                found.append(self._fitted_auto(choice, each, best))
                best = min(best, found[-1].seconds)
            except GaplessError as error:
                missed = missed or error
        return found, missed

    def _cut_again(self, draft: Draft, best: float) -> list[Draft]:
        """Cut for what is recomputed."""
        with suppress(GaplessError):
            return [self.fitted(draft.choice, self.drafts.cut(draft.choice, draft.remat), best)]
        return []

    def _all_cuts(self, choice: Choice, best: float) -> list[Draft]:
        """Those that may be the quickest, the most promising first."""
        drafts, bounds = self.drafts, self.cut_bounds(choice)
        cuts = self._compositions(len(drafts.profile(choice.samples).layers), choice.placement.num_stages)
        found: list[Draft] = []
        until = drafts.effort + _EFFORT
        for least, counts in sorted((bounds.seconds(counts), counts) for counts in cuts):
            if least >= best or drafts.effort > until:
                break
            try:
                draft = self.fitted(choice, counts, best)
            except GaplessError:
                continue
            found.append(draft)
            best = min(best, draft.seconds)
        return found

    def cut_bounds(self, choice: Choice) -> CutBounds:
        profile, speeds = self.drafts.profile(choice.samples), self.drafts.speeds(choice)
        return CutBounds(profile, choice.placement, speeds, choice.microbatches, choice.recipe)

    def _cut_by_memory(self, draft: Draft, best: float) -> list[Draft]:
        """The same with fewer layers where most is held; [] where no cuts fit, or they can't be the best."""
        choice, made = draft.choice, draft
        layers = self.drafts.profile(choice.samples).layers
        fixed = [layer.kept(self.drafts.shards(choice)) for layer in layers]
        grown = 1 + self.drafts.slack
        whole = [grown * (layer.activation - layer.overlap) for layer in layers]
        inputs = [0.0, *(grown * layer.boundary for layer in layers[:-1])]
        flying = [inputs if mode == "layer" else whole for mode in draft.remat]
        copies = [0.0] * draft.schedule.num_stages
        others = [
            self.drafts.profile(choice.samples).reserved + grown * size for size in sent(made.schedule, made.alone)
        ]
        for _ in range(_ROUNDS):
            copies = list(map(max, copies, in_flight_at_peak(made.schedule, made.alone)))
            memory = [
                [size + times * each for size, each in zip(fixed, own, strict=True)]
                for times, own in zip(copies, flying, strict=True)
            ]
            limits = [
                math.inf if limit is None else limit - other
                for other, limit in zip(others, self.drafts.limits(choice), strict=True)
            ]
            if (
                made is draft
                and choice.stages_per_device > 1
                and held_together(memory, draft.counts) > _OVER * sum(limits)
            ):
                return []
            try:
                counts = self.drafts.cut(choice, draft.remat, memory, limits)
                if self.least.recomputed(choice, counts, draft.remat, draft.plain) >= best:
                    return []
                made = self.drafts.make(choice, counts, draft.remat)
            except GaplessError:
                return []
            if self.drafts.fits(made):
                return [made]
            # What is no matter of which layers a device has: messages, workspace, what others take.
            others = [held.reserved + grown * (held.buffers + held.workspace) for held in made.held]
        return []

    def _all_recomputed(self, draft: Draft, again: Remat, best: float) -> list[Draft]:
        """Everything recomputed and cut by memory; then what has the room is no longer recomputed."""
        num_stages = len(draft.counts)
        every: Modes = (again,) * num_stages
        drafts = [self.drafts.make(draft.choice, draft.counts, every)]
        drafts += self._cut_by_memory(drafts[0], best)
        last = drafts[-1]
        if self.drafts.fits(last):
            for stage in reversed(range(num_stages)):
                fewer = self.drafts.make(draft.choice, last.counts, _changed(last.remat, {stage: "none"}))
                last = fewer if self.drafts.fits(fewer) else last
        return [*drafts, last]

    # -- what to recompute --------------------------------------------------------------------------------------------

    def fitted(self, choice: Choice, counts: tuple[int, ...], best: float, first: Draft | None = None) -> Draft:
        """With these cuts, and as little recomputed as each device needs to fit. Raises TooLargeError, or TooSlowError
        where it can't be quicker than `best`.
        """
        if choice.recipe == "auto":
            return self._fitted_auto(choice, counts, best)
        made = first or self.drafts.make(choice, counts)
        options: dict[int, Iterator[dict[int, Remat]]] = {}
        flying: Sequence[float] = ()
        modes = made.remat
        while full := self.drafts.too_full(made):
            if not flying:
                # One on each of the devices that are too full, at the least.
                _refuse_slow(self.least.recomputed(choice, counts, modes, made.plain, full), best)
                flying = in_flight_at_peak(made.schedule, made.alone)
            for device, excess in full.items():
                if device not in options:
                    options[device] = iter(
                        recomputes(made, device, self.drafts.again, flying, excess / (1 + self.drafts.slack))
                    )
                changes = next(options[device], None)
                if changes is None:
                    raise self._too_large(made)
                modes = _changed(modes, changes)
            _refuse_slow(self.least.recomputed(choice, counts, modes, made.plain), best)
            made = self.drafts.make(choice, counts, modes)
        return made

    def _fitted_auto(self, choice: Choice, counts: tuple[int, ...], best: float) -> Draft:
        """It finds an order for any room; but with less recomputed that may be a slow one."""
        limits = self.drafts.limits(choice)
        rooms = [math.inf if limit is None else float(limit) for limit in limits]
        smallest = sorted(range(len(rooms)), key=rooms.__getitem__)
        tried = [nothing_again(len(counts))]
        if any(limit is not None for limit in limits):
            for again, share in product(self.drafts.again, _SHARES):
                some = smallest[: max(1, round(share * len(smallest)))]
                tried.append(_changed(tried[0], {s: again for d in some for s in choice.placement.stages[d]}))
        found: list[Draft] = []
        missed: GaplessError | None = None
        orders = (False, True) if self.drafts.host is not None else (False,)
        for modes, free in product(dict.fromkeys(tried), orders):
            if self.least.recomputed(choice, counts, modes) >= best:
                missed = missed or TooSlowError("with the recomputes that it needs it can't be the fastest")
                continue
            try:
                made = self.drafts.make(choice, counts, modes, free=free)
            except GaplessError as error:
                missed = missed or error
                continue
            if not self.drafts.fits(made):
                missed = missed or self._too_large(made)
                continue
            found.append(made)
            best = min(best, made.seconds)
        if not found:
            assert missed is not None
            raise missed
        return min(found, key=lambda draft: draft.seconds)

    def _too_large(self, draft: Draft) -> TooLargeError:
        limits = self.drafts.limits(draft.choice)
        device = (over_limit(draft.held, limits) or [0])[0]
        held = draft.held[device]
        remat = " even with remat" if set(draft.remat) != {"none"} else ""
        parts = ("parameters", "gradients", "optimizer_state", "activations")
        listed = ", ".join(f"{part.replace('_', ' ')} {show_bytes(getattr(held, part))}" for part in parts)
        return TooLargeError(
            f"device {device} needs {show_bytes(held.total)}{remat}, but has {show_bytes(limits[device] or 0)} "
            f"({listed})",
            self.drafts.excess(draft),
        )


def _changed(modes: Modes, changes: dict[int, Remat]) -> Modes:
    return tuple(changes.get(stage, mode) for stage, mode in enumerate(modes))


def _refuse_slow(least: float, best: float) -> None:
    if least >= best:
        raise TooSlowError(f"it fits only with recomputes, and then takes at least {show_seconds(least)}")
