"""From a draft to a plan: lowered as a Pipeline would, and simulated."""

from collections.abc import Iterable
from itertools import islice

from gapless.plan.plan import Plan
from gapless.plan.predict.breakdown import breakdown
from gapless.plan.predict.footprint import Footprint, over_limit
from gapless.plan.search.drafts import Draft, Drafts
from gapless.schedule.lower import Passes, lowered
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline

_FAR = 1.25  # times the best step: lowering has not been seen to gain more
_FINISHED = 3  # drafts that are lowered


def finished(drafts: Drafts, draft: Draft) -> Plan:
    """As it is, or lowered: whatever is quickest, and fits."""
    choice, stages = draft.choice, draft.stages
    found = [draft.fitted]
    again = [stage for stage, mode in enumerate(draft.remat) if mode == "stage"]
    for early in (True, False) if again else (True,):  # early if there is room for it, or late
        passes = Passes(split=True, fuse=True, recompute=again, early=early)
        timeline = simulate(lowered(draft.plain, stages.costs, passes), stages.costs)
        drafts.effort += 8 * timeline.schedule.num_actions
        fitted = drafts.fitted(choice, stages, timeline)
        if not over_limit(fitted.held, drafts.limits(choice)):
            found.append(fitted)
    # The plain one last of equals: what is lowered has fewer actions.
    return _plan(drafts, draft, *min(reversed(found), key=lambda fitted: fitted.timeline.makespan))


def quickest(drafts: Drafts, found: Iterable[Draft], best: float) -> Plan:
    """Of all drafts. What is far from the `best` step so far is not lowered with all the care that takes."""
    ranked = sorted(found, key=lambda draft: draft.seconds)
    near = [draft for draft in ranked if draft.seconds <= _FAR * min(best, ranked[0].seconds)]
    if not near:
        return _plan(drafts, ranked[0], *ranked[0].fitted)
    different = {(draft.counts, draft.remat): draft for draft in reversed(near)}
    plans = [finished(drafts, draft) for draft in islice(reversed(different.values()), _FINISHED)]
    return min(plans, key=lambda plan: plan.step_seconds)


def _plan(drafts: Drafts, draft: Draft, timeline: Timeline, held: tuple[Footprint, ...]) -> Plan:
    choice, stages, schedule = draft.choice, draft.stages, timeline.schedule
    recomputed = {stage for stage, _ in schedule.recomputed}
    whole = choice.mesh.replicas * choice.microbatches * choice.samples
    return Plan(
        recipe=choice.recipe,
        schedule=schedule.renamed(choice.recipe),
        partition=draft.counts,
        remat=tuple(
            "stage" if stage in recomputed else "layer" if mode == "layer" else "none"
            for stage, mode in enumerate(draft.remat)
        ),
        samples=choice.samples,
        mesh=choice.mesh,
        costs=stages.costs,
        breakdown=breakdown(drafts.profile(choice.samples), stages, timeline, choice.mesh),
        memory=held,
        limits=drafts.limits(choice),
        offload_optimizer=drafts.offloads_optimizer,
        batch=drafts.minibatch if drafts.minibatch not in (None, whole) else None,
    )
