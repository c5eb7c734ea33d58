"""From a choice to a plan: cut the model, build the schedule, see that it fits, and predict the step.

What does not fit is cut by memory too, or recomputed where that frees most, and the quicker of the two is taken.
"""

import math
from collections.abc import Sequence

from gapless.errors import PartitionError
from gapless.plan.cut.stage_costs import Stages
from gapless.plan.plan import Footprint, Plan
from gapless.plan.search.breakdown import breakdown
from gapless.plan.search.choices import Choice
from gapless.plan.search.drafts import Draft, Drafts, TooLargeError, kept
from gapless.plan.search.footprint import in_flight_at_peak, over_limit
from gapless.schedule.lower import Passes, lowered
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline
from gapless.units import show_bytes

_ROUNDS = 4  # of cutting by memory: cuts move what is held at the peak
_FAR = 1.25  # times the best step: lowering has not been seen to gain more


class Judge:
    """Turns choices into plans that fit."""

    def __init__(self, drafts: Drafts) -> None:
        self.drafts = drafts

    def plan(self, choice: Choice, best: float = math.inf) -> Plan:
        """Raises a GaplessError that says why there is none. What is far from the `best` step so far is not lowered
        with all the care that takes.
        """
        first = self.drafts.make(choice, self.drafts.cut(choice, frozenset()))
        if self.drafts.fits(first):
            return self._quickest([first], best)
        drafts = [*self._cut_by_memory(first), *self._recomputed(first)]
        if not any(map(self.drafts.fits, drafts)):
            drafts += self._cut_by_memory(drafts[-1])
        if not any(map(self.drafts.fits, drafts)):
            drafts += self._all_recomputed(first)
        fitting = [draft for draft in drafts if self.drafts.fits(draft)]
        if not fitting:
            raise self._too_large(min((first, *drafts), key=self.drafts.excess))
        return self._quickest(fitting, best)

    def _cut_by_memory(self, draft: Draft) -> list[Draft]:
        """The same with fewer layers where most is held; [] where no cuts fit."""
        choice, made = draft.choice, draft
        layers = self.drafts.profile(choice.samples).layers
        fixed = [kept(layer, self.drafts.shards(choice)) for layer in layers]
        grown = 1 + self.drafts.slack
        flying = [grown * (layer.activation - layer.overlap) for layer in layers]
        copies = [0.0] * draft.schedule.num_stages
        for _ in range(_ROUNDS):
            copies = list(map(max, copies, in_flight_at_peak(made.schedule, made.stages)))
            memory = [[size + times * each for size, each in zip(fixed, flying, strict=True)] for times in copies]
            # Less what is no matter of which layers a device has: messages, workspace, what others take.
            limits = [
                math.inf if limit is None else limit - (held.reserved + grown * (held.buffers + held.workspace))
                for held, limit in zip(made.held, self.drafts.limits(choice), strict=True)
            ]
            try:
                made = self.drafts.make(choice, self.drafts.cut(choice, draft.remat, memory, limits), draft.remat)
            except PartitionError:
                return []
            if self.drafts.fits(made):
                return [made]
        return []

    def _recomputed(self, draft: Draft) -> list[Draft]:
        """Stages of devices that are too full are recomputed, those that free most first; then cut for that again."""
        choice, remat, made = draft.choice, set(draft.remat), draft
        while full := over_limit(made.held, self.drafts.limits(choice)):
            flying = in_flight_at_peak(made.schedule, made.stages)
            before = len(remat)
            for device in full:
                left = [stage for stage in choice.placement.stages[device] if stage not in remat]
                if left:
                    remat.add(max(left, key=lambda stage: (flying[stage] * _freed(made.stages, stage), -stage)))
            if len(remat) == before:
                break
            made = self.drafts.make(choice, draft.counts, frozenset(remat))
        try:
            again = self.drafts.make(choice, self.drafts.cut(choice, remat), frozenset(remat))
        except PartitionError:
            return [made]
        return [made, again]

    def _all_recomputed(self, draft: Draft) -> list[Draft]:
        """Everything recomputed and cut by memory; then what has the room is no longer recomputed."""
        every = frozenset(range(draft.schedule.num_stages))
        drafts = [self.drafts.make(draft.choice, draft.counts, every)]
        drafts += self._cut_by_memory(drafts[0])
        best = drafts[-1]
        if self.drafts.fits(best):
            for stage in reversed(range(draft.schedule.num_stages)):
                fewer = self.drafts.make(draft.choice, best.counts, best.remat - {stage})
                best = fewer if self.drafts.fits(fewer) else best
        return [*drafts, best]

    def finished(self, draft: Draft) -> Plan:
        """Lowered as a Pipeline would, and simulated."""
        choice, stages = draft.choice, draft.stages
        for early in (True, False) if draft.remat else (True,):  # early if there is room for it, or late
            passes = Passes(split=True, fuse=True, recompute=draft.remat, early=early)
            timeline = simulate(lowered(draft.plain, stages.costs, passes), stages.costs)
            held = self.drafts.held(choice, stages, timeline)
            if not over_limit(held, self.drafts.limits(choice)):
                return self._made(draft, timeline, held)
        return self._made(draft, draft.timeline, draft.held)

    def _quickest(self, drafts: Sequence[Draft], best: float) -> Plan:
        draft = min(drafts, key=lambda draft: draft.seconds)
        if draft.seconds > _FAR * best:
            return self._made(draft, draft.timeline, draft.held)
        return self.finished(draft)

    def _made(self, draft: Draft, timeline: Timeline, held: tuple[Footprint, ...]) -> Plan:
        choice, stages, schedule = draft.choice, draft.stages, timeline.schedule
        recomputed = {stage for stage, _ in schedule.recomputed}
        return Plan(
            recipe=choice.recipe,
            schedule=schedule.renamed(choice.recipe),
            partition=draft.counts,
            remat=tuple("stage" if stage in recomputed else "none" for stage in range(schedule.num_stages)),
            samples=choice.samples,
            mesh=choice.mesh,
            costs=stages.costs,
            breakdown=breakdown(self.drafts.profile(choice.samples), stages, timeline, choice.mesh),
            memory=held,
            limits=tuple(self.drafts.limits(choice)),
        )

    def _too_large(self, draft: Draft) -> TooLargeError:
        limits = self.drafts.limits(draft.choice)
        device = over_limit(draft.held, limits)[0]
        held = draft.held[device]
        remat = " even with remat" if draft.remat else ""
        parts = ("parameters", "gradients", "optimizer_state", "activations")
        listed = ", ".join(f"{part.replace('_', ' ')} {show_bytes(getattr(held, part))}" for part in parts)
        return TooLargeError(
            f"device {device} needs {show_bytes(held.total)}{remat}, but has {show_bytes(limits[device] or 0)} "
            f"({listed})",
            self.drafts.excess(draft),
        )


def _freed(stages: Stages, stage: int) -> float:
    size = stages.costs.per_stage("activation", stages.placement)[stage]
    return float(size) - stages.boundary[stage]
