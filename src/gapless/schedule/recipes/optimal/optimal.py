"""The best schedule there is, with the proof: `auto`'s question, answered exactly for small K and M.

A greedy search gives a schedule and leaves open how far it is from the best. Here the question goes to OR-tools'
CP-SAT: a start per action, one action at a time per device, and for every activation an interval from the start of
its F to the end of its W, of which a device may hold no more than the limit at any time:

    device 0       0F0 0F1     0I0 0W0 0F2 0I1 0W1 ...        limit 2: 0F2 waits for 0W0, not only for device 0
    held by 0F0    |-----------------|
    held by 0F1        |---------------------------|

A backward runs whole or in halves, each as it is best. Several placements are searched one after the other, each for
something better than the best so far.

What comes back is a schedule, what it takes by our own simulator, and a bound that no schedule of these placements can
be below, if every stage takes its microbatches in order. Where both are the same the schedule is proven best; when the
time is up first, the gap between them says how much may be left.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NoReturn

from gapless.errors import ScheduleError
from gapless.schedule.action import Schedule
from gapless.schedule.costs import Costs, Number
from gapless.schedule.placement import Placement
from gapless.schedule.recipes.optimal.cp_sat import Model, search, solver_module
from gapless.schedule.recipes.optimal.exact_problem import ExactProblem, exact, fraction
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Objective, plain

_ROUNDING = 1e-6  # a gap below this comes from costs too fine for whole numbers


@dataclass(frozen=True)
class SolverProgress:
    """How far the search is: the best value found, and what no schedule can be below."""

    seconds: float
    value: Number
    bound: Number


@dataclass(frozen=True)
class Optimum:
    """A schedule, what it takes (`value`), and what no schedule can be below (`bound`)."""

    schedule: Schedule
    value: Number
    bound: Number
    seconds: float

    @property
    def gap(self) -> float:
        """The share of the value that a better schedule might save."""
        return float((self.value - self.bound) / self.value) if self.value else 0.0

    @property
    def proven(self) -> bool:
        return self.gap < _ROUNDING


def optimal(
    placements: Placement | Sequence[Placement],
    num_microbatches: int,
    costs: Costs | None = None,
    *,
    memory_limit: Number | None = None,
    objective: Objective = "makespan",
    hint: Schedule | None = None,
    time_limit: float = 60.0,
    progress: Callable[[SolverProgress], None] | None = None,
) -> Optimum:
    """The schedule with the least makespan (or span) under `memory_limit`, per device in the unit of `activation`.

    `hint` is a schedule to start from, and the result is never worse; one that breaks the order of microbatches or
    the limit is passed over. `progress` is called in the caller's thread. Whenever the search gets to its end the value
    is the same, though perhaps with another schedule. Ctrl-C stops it within a moment.

    Recomputes and updates are left out, and so is the queue at a link where the costs have a bandwidth: the bound
    stays true, but may then be out of reach.
    """
    began = time.monotonic()
    module = solver_module()
    costs = costs or Costs()
    limit = None if memory_limit is None else fraction(memory_limit)
    asked = [
        ExactProblem(placement, num_microbatches, exact(costs), limit, objective)
        for placement in ([placements] if isinstance(placements, Placement) else placements)
    ]
    problems = [problem for problem in asked if problem.is_possible] or _refuse_tight_limit(asked)
    wanted = hint.placement if hint else None  # comes last: what the others leave of their time is its own.
    problems.sort(key=lambda problem: (problem.placement.num_stages, problem.placement == wanted))
    hints = [found for problem in problems if (found := problem.accepted(hint))]
    best = min(hints or [problem.timeline(problem.naive) for problem in problems], key=problems[0].value)
    value = problems[0].value(best)
    bounds = [problem.least for problem in problems]
    told = value, min(bounds)

    for number, problem in enumerate(problems):
        if bounds[number] >= value:
            continue

        def report(found: Fraction | None, bound: Fraction, number: int = number) -> None:
            """Passes better values and bounds on, and only those."""
            nonlocal told
            bounds[number] = max(bounds[number], bound)
            best_yet = told[0] if found is None else min(told[0], found)
            better = best_yet, min(best_yet, *bounds)
            if progress is not None and better != told:
                progress(SolverProgress(time.monotonic() - began, *map(plain, better)))
            told = better

        model = Model(module, problem, value, best if best.schedule.placement == problem.placement else None)
        left = (time_limit - (time.monotonic() - began)) / (len(problems) - number)
        made, bound = search(module, model, max(0.1, left), report)
        bounds[number] = max(bounds[number], bound)
        found = problem.accepted(made)
        if found is not None and problem.value(found) < value:
            best, value = found, problem.value(found)
    schedule = best.schedule.renamed("optimal")
    simulated: Number = getattr(simulate(schedule, costs), objective)
    lowest = min(bounds)
    proven = simulated if lowest >= value else min(simulated, plain(lowest))
    return Optimum(schedule, simulated, proven, time.monotonic() - began)


def _refuse_tight_limit(asked: Sequence[ExactProblem]) -> NoReturn:
    problem = min(asked, key=lambda problem: problem.smallest)
    least, device = problem.smallest
    assert problem.limit is not None
    raise ScheduleError(
        f"no schedule fits a memory limit of {plain(problem.limit)}: one microbatch alone takes {plain(least)} on "
        f"device {device}, so that is the smallest limit"
    )
