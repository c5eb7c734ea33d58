"""The last per cent of a plan: cuts are moved layer by layer as long as the simulated step gets shorter.

A partition knows stages and hops one by one. What two stages of one device cost together, or that the first and last
devices have time to spare while a pipeline fills, only a simulation tells.
"""

from collections.abc import Callable
from itertools import product

from gapless.errors import GaplessError
from gapless.plan.plan import Plan
from gapless.plan.search.choices import Choice
from gapless.plan.search.judge import Judge

_MOST_ACTIONS = 600_000  # that are simulated in all


def refined(judge: Judge, choice: Choice, plan: Plan, out_of_time: Callable[[], bool]) -> Plan:
    """The plan, or a quicker one with other cuts that fits too."""
    remat = frozenset(stage for stage, kind in enumerate(plan.remat) if kind == "stage")
    tries = _MOST_ACTIONS // max(1, plan.schedule.num_actions)
    if choice.recipe == "auto":
        tries //= 50  # a schedule of its own for every try
    best = judge.drafts.make(choice, plan.partition, remat)
    moved = True
    while moved and tries > 0 and not out_of_time():
        moved = False
        for cut, layers in product(range(len(plan.partition) - 1), (1, -1)):
            counts = list(best.counts)
            counts[cut] += layers
            counts[cut + 1] -= layers
            if min(counts[cut], counts[cut + 1]) < 1 or tries <= 0:
                continue
            tries -= 1
            try:
                draft = judge.drafts.make(choice, tuple(counts), remat)
            except GaplessError:
                continue
            if judge.drafts.fits(draft) and draft.seconds < best.seconds * (1 - 1e-9):
                best, moved = draft, True
    better = judge.finished(best)
    return better if better.step_seconds < plan.step_seconds * (1 - 1e-9) else plan
