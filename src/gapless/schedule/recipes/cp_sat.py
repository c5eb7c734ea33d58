"""The problem as CP-SAT takes it, whole numbers on a grid of ticks, and the search for its answer.

Every cost is a whole number of ticks where that is possible. Where it is not, all are rounded *down*, and every true
schedule with its starts rounded down still is a solution here (floor(a + b) >= floor(a) + floor(b)), so no bound gets
too high.
"""

import contextlib
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import accumulate
from typing import Any, NamedTuple

from gapless.errors import ConfigError
from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.memory import changes
from gapless.schedule.recipes.exact_problem import ExactProblem
from gapless.schedule.timeline import Timeline

_F, _I, _W = Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD
_MOST_TICKS = 2**31  # in a whole schedule
_MOST_UNITS = 2**40  # of memory
_METHODS = 8  # at once, more than there may be cores: one of them has the proof
_GRACE = 0.5  # seconds for the solver to see that its time is up


def solver_module() -> Any:
    """OR-tools' CP-SAT, which only the extra `optimal` installs."""
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ConfigError("`optimal` needs OR-tools, which is not installed: pip install gapless[optimal]") from None
    return cp_model


def _unit(numbers: Iterable[Fraction], whole: Fraction, most: int) -> tuple[Fraction, bool]:
    """The largest unit of which all are multiples, and True; or a rounded one, and False, if `whole` has too many."""
    fractions = [Fraction(number) for number in numbers]
    bottom = math.lcm(*(number.denominator for number in fractions))
    unit = Fraction(math.gcd(*(int(number * bottom) for number in fractions)) or bottom, bottom)
    return (unit, True) if whole <= most * unit else (whole / most, False)


class Model:
    """A start per action and the objective, with everything that ties them."""

    def __init__(self, cp: Any, asked: ExactProblem, best: Timeline, hinted: bool) -> None:
        self.asked = asked
        slowest = Fraction(asked.timeline(asked.naive).makespan)
        times = list(map(asked.duration, asked.naive.actions))
        self.tick, self.exact = _unit([*times, *asked.hops], slowest, _MOST_TICKS)
        self.cp = cp.CpModel()
        horizon = self.down(slowest)
        self.starts = {action: self.cp.new_int_var(0, horizon, str(action)) for action in asked.naive.actions}
        self._order()
        self._memory(horizon)
        self._objective(asked.value(best))
        if hinted:
            for action, start, _ in best.all_spans:
                self.cp.add_hint(self.starts[action], self.down(Fraction(start)))

    def down(self, number: Fraction) -> int:
        return math.floor(number / self.tick)

    def true(self, ticks: float) -> Fraction:
        """What the solver's bound on the objective means for schedules with the true costs."""
        rounded = not self.exact and self.asked.objective == "span"  # a first start rounded down makes a span longer
        return (math.ceil(ticks - 1e-6) - rounded) * self.tick

    def end(self, action: Action) -> Any:
        return self.starts[action] + self.down(self.asked.duration(action))

    def _order(self) -> None:
        asked = self.asked
        for before, after in asked.edges():
            self.cp.add(self.starts[after] >= self.starts[before] + self.down(asked.lag(before, after)))
        for row in asked.naive.rows:
            self.cp.add_no_overlap(
                self.cp.new_fixed_size_interval_var(self.starts[action], self.down(asked.duration(action)), "")
                for action in row
            )
        for action, start in asked.fixed.items():
            self.cp.add(self.starts[action] == self.down(start))

    def _memory(self, horizon: int) -> None:
        """What an I or a W gives back was held from the start of its F to its own end."""
        limit = self.asked.limit
        if limit is None:
            return
        for row, deltas in zip(self.asked.naive.rows, changes(self.asked.naive, self.asked.costs), strict=True):
            gives = {action: Fraction(given) for action, (_, given) in zip(row, deltas, strict=True) if given}
            if sum(gives.values()) <= limit:
                continue
            self._forced_order(row, gives, limit)
            if len({(action.stage, action.kind) for action in gives}) == 1:
                continue  # one stage that holds everything until its W: the forced order says it all
            unit, _ = _unit([*gives.values()], max(limit, sum(gives.values(), Fraction(0))), _MOST_UNITS)
            held = [
                self.cp.new_interval_var(
                    self.starts[Action(a.stage, _F, a.microbatch)], self.cp.new_int_var(0, horizon, ""), self.end(a), ""
                )
                for a in gives
            ]
            self.cp.add_cumulative(
                held, [math.floor(given / unit) for given in gives.values()], math.floor(limit / unit)
            )

    def _forced_order(self, row: tuple[Action, ...], gives: dict[Action, Fraction], limit: Fraction) -> None:
        """An F that would find the memory full whatever the order waits for an I or W: implied, but helps the proof."""
        chains: dict[tuple[int, Kind], list[Action]] = defaultdict(list)
        for action in row:
            chains[action.stage, action.kind].append(action)
        stages = sorted({action.stage for action in row})
        kept = {stage: gives.get(chains[stage, _W][0], Fraction(0)) for stage in stages}
        full = {stage: kept[stage] + gives.get(chains[stage, _I][0], Fraction(0)) for stage in stages}
        # Until the I of a stage, a microbatch holds the memory of the device's stages before it as well.
        below = accumulate(full.values()) if self.asked.placement.single else iter(full.values())
        for stage, together in zip(stages, below, strict=True):
            room = {_I: limit // together if together else None}
            room[_W] = 1 + (limit - full[stage]) // kept[stage] if kept[stage] else None
            for kind, most in room.items():
                if most is not None:
                    for before, after in zip(chains[stage, kind], chains[stage, _F][int(most) :], strict=False):
                        self.cp.add(self.starts[after] >= self.end(before))

    def _objective(self, cutoff: Fraction) -> None:
        span = self.asked.objective == "span"
        rounding = 0 if self.exact else 1
        self.goal = self.cp.new_int_var(self.down(self.asked.least), self.down(cutoff) + rounding, self.asked.objective)
        for row in self.asked.naive.rows:
            chains = {(action.stage, action.kind): action for action in reversed(row)}  # the first action of each
            last = {(action.stage, action.kind): action for action in row}
            for (_, kind), action in last.items():
                if kind is _W:
                    begins = [self.starts[a] for (_, k), a in chains.items() if k is _F] if span else [0]
                    for begin in begins:
                        self.cp.add(self.goal >= self.end(action) - begin)
        self.cp.minimize(self.goal)

    def schedule(self, starts: dict[Action, int]) -> Schedule:
        """Each device's actions by start. Those that take no time may share one: the microbatch's own order decides."""
        stages = self.asked.placement.num_stages
        within = {_F: lambda s: s, _I: lambda s: 2 * stages - s, _W: lambda s: 3 * stages - s}

        def key(action: Action) -> tuple[int, ...]:
            stage, kind, microbatch = action
            end = starts[action] + self.down(self.asked.duration(action))
            return starts[action], end, microbatch, within[kind](stage)

        return self.asked.naive.with_rows(sorted(row, key=key) for row in self.asked.naive.rows)


class _News(NamedTuple):
    """What the solver's threads tell: a better solution with its value, or a better bound."""

    bound: float
    value: float | None = None
    starts: dict[Action, int] | None = None


def search(
    module: Any, model: Model, time_limit: float, told: Callable[[Fraction | None, Fraction], None]
) -> tuple[Schedule | None, Fraction]:
    """The best schedule and bound of one run of the solver; every better value and bound is told.

    It has a thread of its own, so that Ctrl-C and what is told stay in the caller's. The solver looks at its clock and
    at our request to stop only now and then, seconds apart in a large model. We don't wait for that: it ends by itself,
    unheard. The thread is no daemon: the interpreter must outlive it.
    """
    news: queue.SimpleQueue[_News] = queue.SimpleQueue()
    schedule: Schedule | None = None
    bound = Fraction(0)

    def hear(each: _News) -> None:
        nonlocal schedule, bound
        bound = max(bound, model.true(each.bound))
        schedule = schedule if each.starts is None else model.schedule(each.starts)
        told(None if each.value is None else round(each.value) * model.tick, bound)

    solver = _solver(module, time_limit)
    solver.best_bound_callback = lambda bound: news.put(_News(bound))
    deadline = time.monotonic() + time_limit + _GRACE
    thread = threading.Thread(target=solver.solve, args=(model.cp, _listener(module, model, news)))
    thread.start()
    try:
        while thread.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                hear(news.get(timeout=0.05))
    finally:
        solver.stop_search()
        thread.join(_GRACE)
    if not thread.is_alive():
        assert solver.response_proto.status != module.INFEASIBLE, "a schedule that exists was ruled out"
        news.put(_News(solver.best_objective_bound))
    while not news.empty():
        hear(news.get())
    return schedule, bound


def _solver(module: Any, time_limit: float) -> Any:
    solver = module.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit
    solver.parameters.random_seed = 0
    solver.parameters.num_workers = _METHODS
    solver.parameters.catch_sigint_signal = False
    return solver


def _listener(module: Any, model: Model, news: "queue.SimpleQueue[_News]") -> Any:
    class Listener(module.CpSolverSolutionCallback):  # type: ignore[misc]
        def on_solution_callback(self) -> None:
            starts = {action: self.value(variable) for action, variable in model.starts.items()}
            news.put(_News(self.best_objective_bound, self.objective_value, starts))

    return Listener()
