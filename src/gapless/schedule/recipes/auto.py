"""The schedule for *these* costs and *this* memory: of all that is tried the best, by the simulator.

List scheduling is tried with several policies, and each schedule it finds is justified: the one leaves no gap at the
start, the other none at the end. The named recipes are tried too, so that none is ever better. What a bound proves to
be worse than the best so far is left out: that keeps it quick. So is the justification of a large schedule that is far
behind the best.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from gapless.errors import ConfigError, ScheduleError
from gapless.schedule.action import Kind, Schedule
from gapless.schedule.costs import Costs, Number
from gapless.schedule.memory import peaks
from gapless.schedule.placement import Placement
from gapless.schedule.placement import line as line_placement
from gapless.schedule.placement import vee as vee_placement
from gapless.schedule.recipes import line, vee, zero_bubble
from gapless.schedule.recipes.building_block import v_two_thirds
from gapless.schedule.recipes.greedy import Policy, greedy
from gapless.schedule.recipes.justification import justified
from gapless.schedule.recipes.request import Request
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Objective, Timeline
from gapless.units import show_count

# The most useful first: large schedules get no further than `_EFFORT` actions in all allow, but at least to the fourth.
_FIRST = {
    "line": (
        Policy(0.0, 2.0),
        Policy(0.5, 1.5),
        Policy(0.0, 1.0, 1),
        Policy(0.5, 2.0),
        Policy(0.5, 1.5, 1),
        Policy(0.0, 2.0, 1),
        Policy(0.0, 3.0),
        Policy(1.0, 2.0, 1),
    ),
    "vee": (
        Policy(0.0, oldest_first=True),
        Policy(0.0),
        Policy(0.5, 1.0),
        Policy(0.0, 2.0),
        Policy(0.0, 1.0, oldest_first=True),
        Policy(0.0, 1.5),
        Policy(0.0, 2.0, oldest_first=True),
        Policy(0.5, 2.0, oldest_first=True),
        Policy(0.0, 1.0, 1),
        Policy(0.5, 1.5, 1),
        Policy(1.0, 1.0, oldest_first=True),
    ),
}
_REST = tuple(
    Policy(patience, head_start, backlog)
    for patience in (0.0, 0.5, 1.0)
    for head_start, backlog in ((None, None), (2.0, None), (1.5, None), (1.0, None), (None, 1), (2.0, 1), (1.0, 1))
)
_EFFORT = 40_000
_LARGE = 4_000  # actions: from here on the recipes come first, and what is far behind them is not justified
_FEW = 4  # where memory is short and the recipes have gone first, policies rarely win
_HOPELESS = 1.1  # justification rarely gains more than a tenth, and what starts that far behind has never won
_ROUNDING = 1e-9  # more than a sum of floats is ever off, as a share of it


def auto(request: Request) -> Schedule:
    """The best schedule found: 1 stage per device is a line, 2 are a vee, None tries both where the costs allow."""
    limit = request.limit
    search = _Tries(request.microbatches, request.costs, limit, request.objective)
    placements = _placements(request.devices, request.costs, request.stages_per_device)
    least = [search.run(placement) for placement in placements]
    if search.best is None:
        assert limit is not None
        raise ScheduleError(
            f"no schedule of {show_count(request.devices, 'device')} and "
            f"{show_count(request.microbatches, 'microbatch')} fits a memory limit of {float(limit):g}: the smallest "
            f"peak, one microbatch at a time, is {float(min(least)):g}"
        )
    search.polish(search.best)
    return search.best.schedule.renamed("auto")


class _Tries:
    """Keeps the best of the schedules tried that fit."""

    def __init__(self, num_microbatches: int, costs: Costs, limit: Number | None, objective: Objective) -> None:
        self.num_microbatches, self.costs, self.limit, self.objective = num_microbatches, costs, limit, objective
        self.best: Timeline | None = None

    def run(self, placement: Placement) -> Number:
        """Try all that may be better on this placement; returns the smallest peak a schedule can have there."""
        # One microbatch alone fills all stages of a device before any of them gives something back.
        sizes = self.costs.per_stage("activation", placement)
        least = max(sum(sizes[stage] for stage in stages) for stages in placement.stages)
        if self.limit is None or least <= self.limit:
            bounds = self._bounds(placement, self._deferrable(placement))
            if not self._is_below(bounds):
                for recipe in _quick_recipes(placement):
                    self._try_with_justification(recipe(placement.num_devices, self.num_microbatches), self.limit)
            if self._is_large(placement):
                self._try_slow(placement)
                self._try_policies(placement, bounds)
            else:
                self._try_policies(placement, bounds)
                self._try_slow(placement)
        return least

    def _try_slow(self, placement: Placement) -> None:
        for recipe, most in _slow_recipes(placement, self.costs):
            if not self._is_below(self._bounds(placement, self._deferrable(placement, most))):
                self._try_with_justification(recipe(placement.num_devices, self.num_microbatches), self.limit)

    def _is_large(self, placement: Placement) -> bool:
        return 3 * placement.num_stages * self.num_microbatches > _LARGE

    def _try_policies(self, placement: Placement, bounds: tuple[Number, Number]) -> None:
        policies = dict.fromkeys(_FIRST[placement.shape] + _REST)
        passes = max(4, _EFFORT // (3 * placement.num_stages * self.num_microbatches))
        if self._is_large(placement) and self.limit is not None and _slow_recipes(placement, self.costs):
            passes = _FEW
        seen: set[Schedule] = set()
        for policy in islice(policies, passes):
            if self._is_below(bounds) or self._reaches(bounds):
                return
            for limit in self._limits(placement):
                schedule = greedy(placement, self.num_microbatches, self.costs, limit, policy)
                if schedule is not None and schedule not in seen:
                    seen.add(schedule)
                    if self._try_with_justification(schedule, limit):
                        break

    def _limits(self, placement: Placement) -> list[Number | None]:
        """Sums of floats such as 0.6 vary with their order, so what is justified may miss the limit by a hair."""
        sizes = self.costs.per_stage("activation", placement)
        sizes += self.costs.per_stage("kept_for_weight_grad", placement)
        exact = all(not isinstance(size, float) or (size * 1024).is_integer() for size in sizes)
        return [self.limit] if exact or self.limit is None else [self.limit, self.limit * (1 - _ROUNDING)]

    def _try_with_justification(self, schedule: Schedule, limit: Number | None) -> bool:
        """Whether what is justified within `limit` fits too."""
        timeline = self._try(schedule)
        if timeline is None or Kind.BACKWARD in schedule.kinds:
            return False
        assert self.best is not None
        far_behind = self._value(timeline)[0] > _HOPELESS * self._value(self.best)[0]
        if far_behind and self._is_large(schedule.placement):
            return False
        return self._try(self._justified(timeline, limit)) is not None

    def polish(self, best: Timeline) -> None:
        """Justify the best again as long as that gains something."""
        for _ in range(2):
            if Kind.BACKWARD not in best.schedule.kinds:
                self._try(self._justified(best, self.limit))
            if self.best is None or self.best is best:
                return
            best = self.best

    def _justified(self, timeline: Timeline, limit: Number | None) -> Schedule:
        return justified(timeline, limit, ends_together=self.objective == "makespan")

    def _try(self, schedule: Schedule) -> Timeline | None:
        """What the schedule takes, if it fits."""
        if self.limit is not None and max(peaks(schedule, self.costs)) > self.limit:
            return None
        timeline = simulate(schedule, self.costs)
        if self.best is None or self._value(timeline) < self._value(self.best):
            self.best = timeline
        return timeline

    def _value(self, timeline: Timeline) -> tuple[Number, Number, int]:
        return *self._ranked(timeline.makespan, timeline.span), timeline.schedule.num_stages

    def _ranked(self, makespan: Number, span: Number) -> tuple[Number, Number]:
        return (makespan, span) if self.objective == "makespan" else (span, makespan)

    def _is_below(self, bounds: tuple[Number, Number]) -> bool:
        return self.best is not None and self._value(self.best)[0] * (1 + _ROUNDING) < bounds[0]

    def _reaches(self, bounds: tuple[Number, Number]) -> bool:
        if self.best is None:
            return False
        pairs = zip(self._value(self.best), bounds, strict=False)
        return all(value <= bound * (1 + _ROUNDING) for value, bound in pairs)

    def _bounds(self, placement: Placement, deferrable: Iterable[Number]) -> tuple[Number, Number]:
        """What no schedule can be below if a device has at most so much work left after its last I, all of it W.

        device 0   |-- F down to r --|                                     |-- I up from r --|W|
        device r                     |-- all its work but what it defers --|-- deferred W --|
        """
        durations = self.costs.durations(placement)
        forward, inputs, weights = (durations[kind] for kind in (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD))
        between = self.costs.hops(placement)
        makespan: Number = 0
        span: Number = 0
        for stages, left in zip(placement.stages, deferrable, strict=True):
            first = stages[0]
            work = self.num_microbatches * sum(forward[s] + inputs[s] + weights[s] for s in stages)
            head = sum(forward[:first]) + sum(between[: first + 1])
            tail = sum(inputs[:first]) + sum(between[: first + 1]) + weights[0]
            makespan = max(makespan, head + work)
            span = max(span, work, head + work - left + tail if first else 0)
        return self._ranked(max(makespan, span), span)

    def _deferrable(self, placement: Placement, most: int | None = None) -> Iterator[Number]:
        """Per device how much work in W it can put off at once, by the limit and, where given, at `most` so many W."""
        weights = self.costs.durations(placement)[Kind.WEIGHT_GRAD]
        sizes = self.costs.per_stage("kept_for_weight_grad", placement)
        for stages in placement.stages:
            work: Number = self.num_microbatches * sum(weights[s] for s in stages)
            if most is not None:
                work = min(work, most * max(weights[s] for s in stages))
            if self.limit is not None and all(sizes[s] for s in stages):
                work = min(work, self.limit * max(weights[s] / sizes[s] for s in stages))
            yield work


def _placements(K: int, costs: Costs, stages_per_device: int | None) -> Iterator[Placement]:
    """The vee first: it is rarely worse, and what it reaches may rule out the line."""
    lengths = {len(value) for value in vars(costs).values() if isinstance(value, tuple)}
    if stages_per_device is None and not (lengths <= {K} or lengths <= {2 * K}):
        raise ConfigError(f"costs list {sorted(lengths)} stages, but auto places {K} in a line or {2 * K} in a vee")
    for each, placement in ((2, vee_placement), (1, line_placement)):
        if stages_per_device == each or (stages_per_device is None and lengths <= {each * K}):
            yield placement(K)


def _quick_recipes(placement: Placement) -> list[Callable[[int, int], Schedule]]:
    if placement.shape == "vee":
        return [vee.zb_v, vee.dualpipe_v]
    return [
        line.naive,
        line.gpipe,
        line.one_forward_one_backward,
        line.eager_one_forward_one_backward,
        zero_bubble.zb_h1,
        zero_bubble.zb_h2,
    ]


def _slow_recipes(placement: Placement, costs: Costs) -> list[tuple[Callable[[int, int], Schedule], int]]:
    """Each with the number of activations, and so of W, of all stages of a device that it ever holds."""
    if placement.shape != "vee":
        return []
    K = placement.num_devices
    return [
        (lambda K, M: v_two_thirds(K, M, costs), 2 * ((2 * K + 2) // 3)),
        (lambda K, M: vee.v_half(K, M, costs), 2 * ((K + 2) // 2)),
        (lambda K, M: vee.v_min(K, M, costs), 2 * ((K + 4) // 3)),
    ]
