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

from gapless.errors import optional
from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.dependencies import completes
from gapless.schedule.memory import changes
from gapless.schedule.recipes.optimal.exact_problem import ExactProblem
from gapless.schedule.timeline import Timeline

_F, _B, _I, _W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD
_MOST_TICKS = 2**31  # in a whole schedule
_MOST_UNITS = 2**40  # of memory
_METHODS = 8  # at once, more than there may be cores: one of them has the proof
_GRACE = 0.5  # seconds for the solver to see that its time is up


def solver_module() -> Any:
    """OR-tools' CP-SAT, which only the extra `optimal` installs."""
    missing = "`optimal` needs OR-tools, which is not installed: pip install gapless[optimal]"
    return optional("ortools.sat.python.cp_model", missing)


def _unit(numbers: Iterable[Fraction], whole: Fraction, most: int) -> tuple[Fraction, bool]:
    """The largest unit of which all are multiples, and True; or a rounded one, and False, if `whole` has too many."""
    fractions = [Fraction(number) for number in numbers]
    bottom = math.lcm(*(number.denominator for number in fractions))
    unit = Fraction(math.gcd(*(int(number * bottom) for number in fractions)) or bottom, bottom)
    return (unit, True) if whole <= most * unit else (whole / most, False)


class Model:
    """A start per action and the objective, with everything that ties them. Where a whole backward is the cheaper one,
    each has a switch, `whole`: its I then takes as long as B does, and its W no time right behind it.

    cutoff  what is not above this is looked for
    """

    def __init__(self, cp: Any, asked: ExactProblem, cutoff: Fraction, hint: Timeline | None) -> None:
        self.asked, self.cutoff, self.is_possible = asked, cutoff, hint is not None
        slowest = Fraction(asked.timeline(asked.naive).makespan)
        times = [time for kind in (_F, _I, _W, _B) for time in asked.durations[kind]]
        self.tick, self.exact = _unit([*times, *asked.hops], slowest, _MOST_TICKS)
        self.cp = cp.CpModel()
        self.horizon = self.down(slowest)
        self.starts = {action: self._moment(str(action)) for action in asked.naive.actions}
        self.whole = {
            action: self.cp.new_bool_var(f"{action} whole")
            for action in asked.naive.actions
            if action.kind is _I and asked.is_cheaper_whole(action.stage)
        }
        self._sizes: dict[Action, Any] = {}  # where they depend on a switch
        self._ends: dict[Action, Any] = {}
        self._choices()
        self._order()
        self._memory()
        self._objective()
        for action, start, end in hint.all_spans if hint else ():
            first, *rest = completes(action)
            self.cp.add_hint(self.starts[first], self.down(Fraction(start)))
            for half in rest:
                self.cp.add_hint(self.starts[half], self.down(Fraction(end)))
            if first in self.whole:
                self.cp.add_hint(self.whole[first], bool(rest))

    def down(self, number: Fraction) -> int:
        return math.floor(number / self.tick)

    def true(self, ticks: float) -> Fraction:
        """What the solver's bound on the objective means for schedules with the true costs."""
        rounded = not self.exact and self.asked.objective == "span"  # a first start rounded down makes a span longer
        return (math.ceil(ticks - 1e-6) - rounded) * self.tick

    def ticks(self, action: Action) -> int:
        return self.down(self.asked.duration(action))

    def end(self, action: Action) -> Any:
        return self._ends[action] if action in self._ends else self.starts[action] + self.ticks(action)

    def _moment(self, name: str = "") -> Any:
        return self.cp.new_int_var(0, self.horizon, name)

    def _choices(self) -> None:
        """What the halves of a backward that may be whole are tied to."""
        for first, whole in self.whole.items():
            stage, _, microbatch = first
            second = Action(stage, _W, microbatch)
            longer = self.ticks(Action(stage, _B, microbatch)) - self.ticks(first)
            self._sizes[first] = self.ticks(first) + longer * whole
            self._sizes[second] = self.ticks(second) - self.ticks(second) * whole
            for half in (first, second):
                self._ends[half] = self._moment()
                self.cp.add(self._ends[half] == self.starts[half] + self._sizes[half])
            self.cp.add(self.starts[second] == self._ends[first]).only_enforce_if(whole)

    def _order(self) -> None:
        asked = self.asked
        for before, after in asked.edges():
            self.cp.add(self.starts[after] >= self.end(before) + self.down(asked.hop(before, after)))
            first = Action(after.stage, _I, after.microbatch)
            if before.kind is after.kind is _W and first in self.whole:  # no B goes ahead of the W before it
                self.cp.add(self.starts[first] >= self.end(before)).only_enforce_if(self.whole[first])
        for row in asked.naive.rows:
            self.cp.add_no_overlap(map(self._interval, row))
        for action, start in asked.fixed.items():
            self.cp.add(self.starts[action] == self.down(start))

    def _interval(self, action: Action) -> Any:
        """When a device is busy with it."""
        if action in self._sizes:
            return self.cp.new_interval_var(self.starts[action], self._sizes[action], self._ends[action], "")
        return self.cp.new_fixed_size_interval_var(self.starts[action], self.ticks(action), "")

    def _memory(self) -> None:
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
                    self.starts[Action(a.stage, _F, a.microbatch)], self._moment(), self.end(a), ""
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

    def _objective(self) -> None:
        span = self.asked.objective == "span"
        rounding = 0 if self.exact else 1
        most = self.down(self.cutoff) + rounding
        self.goal = self.cp.new_int_var(self.down(self.asked.least), most, self.asked.objective)
        for row in self.asked.naive.rows:
            chains = {(action.stage, action.kind): action for action in reversed(row)}  # the first action of each
            last = {(action.stage, action.kind): action for action in row}
            for (_, kind), action in last.items():
                if kind is _W:
                    begins = [self.starts[a] for (_, k), a in chains.items() if k is _F] if span else [0]
                    for begin in begins:
                        self.cp.add(self.goal >= self.end(action) - begin)
        self.cp.minimize(self.goal)

    def schedule(self, value: Callable[[Any], int]) -> Schedule:
        """Each device's actions by start. Those that take no time may share one: the microbatch's own order decides."""
        stages = self.asked.placement.num_stages
        within = {_F: lambda s: s, _I: lambda s: 2 * stages - s, _W: lambda s: 3 * stages - s}
        whole = {action for action, switch in self.whole.items() if value(switch)}
        rows = []
        for row in self.asked.naive.rows:
            timed = []
            for action in row:
                stage, kind, microbatch = action
                if kind is _W and Action(stage, _I, microbatch) in whole:
                    continue
                made = Action(stage, _B, microbatch) if action in whole else action
                start = value(self.starts[action])
                timed.append(((start, start + self.ticks(made), microbatch, within[kind](stage)), made))
            rows.append([made for _, made in sorted(timed)])
        return self.asked.naive.with_rows(rows)


class _News(NamedTuple):
    """What the solver's threads tell: a better solution with its value, or a better bound."""

    bound: float
    value: float | None = None
    schedule: Schedule | None = None


def search(
    module: Any, model: Model, time_limit: float, told: Callable[[Fraction | None, Fraction], None]
) -> tuple[Schedule | None, Fraction]:
    """The best schedule and bound of one run of the solver; every better value and bound is told. Where nothing is
    below the model's cutoff, that is the bound.

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
        schedule = each.schedule or schedule
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
    ended = not thread.is_alive()
    impossible = ended and solver.response_proto.status == module.INFEASIBLE
    assert not (impossible and model.is_possible), "a schedule that exists was ruled out"
    if ended and not impossible:
        news.put(_News(solver.best_objective_bound))
    while not news.empty():
        hear(news.get())
    return schedule, model.cutoff if impossible else bound


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
            news.put(_News(self.best_objective_bound, self.objective_value, model.schedule(self.value)))

    return Listener()
