"""The last per cent of a plan: cuts are moved layer by layer as long as the simulated step gets shorter.

A partition knows stages and hops one by one. What two stages of one device cost together, or that the first and last
devices have time to spare while a pipeline fills, only a simulation tells.
"""

from collections.abc import Callable
from itertools import permutations

from gapless.errors import GaplessError
from gapless.plan.plan import Plan
from gapless.plan.search.choices import Choice
from gapless.plan.search.finish import finished
from gapless.plan.search.judge import Judge

_EFFORT = 200_000  # actions that are simulated


def refined(judge: Judge, choice: Choice, plan: Plan, out_of_time: Callable[[], bool]) -> Plan:
    """The plan, or a quicker one with other cuts that fits too. What is recomputed follows the cuts."""
    drafts = judge.drafts
    if drafts.weight(choice) > _EFFORT:
        return plan  # an order for other cuts takes too long
    until = drafts.effort + _EFFORT
    bounds = judge.cut_bounds(choice)
    try:
        best = drafts.make(choice, plan.partition, plan.remat)
    except GaplessError:
        return plan
    seen = {best.counts}
    # From one stage to another: all cuts between them move by a layer. Neighbours come first.
    stages = sorted(permutations(range(len(plan.partition)), 2), key=lambda pair: (abs(pair[0] - pair[1]), min(pair)))
    moved = True
    while moved and not out_of_time():
        moved = False
        for gains, loses in stages:
            counts = list(best.counts)
            counts[gains] += 1
            counts[loses] -= 1
            moves = tuple(counts)
            if counts[loses] < 1 or moves in seen or drafts.effort + drafts.weight(choice) > until:
                continue
            seen.add(moves)
            if bounds.seconds(moves) >= best.seconds:
                continue
            try:
                draft = judge.fitted(choice, moves, best.seconds)
            except GaplessError:
                continue
            if draft.seconds < best.seconds * (1 - 1e-9):
                best, moved = draft, True
    better = finished(drafts, best)
    return better if better.step_seconds < plan.step_seconds * (1 - 1e-9) else plan
