"""The schedule for *these* costs and *this* memory: of all that is tried the best, by the simulator.

List scheduling is tried with several policies, and each schedule it finds is justified: the one leaves no gap at the
start, the other none at the end. The named recipes are tried too, so that none is ever better. What a bound proves to
be worse than the best so far is left out: that keeps it quick. So is the justification of a large schedule that is far
behind the best.

Where a whole backward costs less than its halves, all is tried in two ways: in halves, which are fused afterwards where
that gains; and with whole backwards, which are to the search an I that takes as long as B, and a W of no time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from operator import add

from gapless.errors import ScheduleError
from gapless.schedule.action import Kind, Schedule
from gapless.schedule.costs import Costs, Number
from gapless.schedule.lower.fusion import fuse, in_halves, with_whole_backwards
from gapless.schedule.memory import fits, peaks
from gapless.schedule.placement import Placement
from gapless.schedule.recipes import line, loop, vee, zero_bubble
from gapless.schedule.recipes.building_block import v_two_thirds
from gapless.schedule.recipes.greedy import Policy, greedy
from gapless.schedule.recipes.justification import justified
from gapless.schedule.recipes.request import Request
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline
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


def auto(request: Request, placements: Sequence[Placement] | None = None) -> Schedule:
    """The best schedule found on these placements, or on all that the request allows."""
    placements = placements or request.placements
    best: Timeline | None = None
    for placement in placements:
        for costs in _ways_to_count(request.costs, placement):
            tries = _Tries(request, placement, costs, best)
            tries.run()
            best = tries.best
    if best is None:
        assert request.limit is not None
        least = min(_smallest_peak(request.costs, placement) for placement in placements)
        raise ScheduleError(
            f"no schedule of {show_count(request.devices, 'device')} and "
            f"{show_count(request.microbatches, 'microbatch')} fits a memory limit of {float(request.limit):g}: the "
            f"smallest peak, one microbatch at a time, is {float(least):g}"
        )
    made = _Tries(request, best.schedule.placement, best.costs, best).polished()
    schedule = made.schedule
    if made.costs is not request.costs:  # cheaper whole backwards were all in their I
        schedule = with_whole_backwards(schedule, _cheaper_whole(request.costs, schedule.placement))
    return schedule.renamed("auto")


class _Tries:
    """Keeps the best of the schedules of one placement that are tried and fit."""

    def __init__(self, request: Request, placement: Placement, costs: Costs, best: Timeline | None) -> None:
        self.num_microbatches, self.limit, self.objective = request.microbatches, request.limit, request.objective
        self.placement, self.costs, self.best = placement, costs, best
        self.is_large = 3 * placement.num_stages * self.num_microbatches > _LARGE
        self.gains_by_fusing = bool(_cheaper_whole(costs, placement))

    def run(self) -> None:
        """Try all that may be better."""
        if not fits(_smallest_peak(self.costs, self.placement), self.limit):
            return
        bounds = self._bounds(self._deferrable())
        if not self._is_below(bounds):
            for recipe in _quick_recipes(self.placement):
                self._try_recipe(recipe(self.placement.num_devices, self.num_microbatches))
        if not self.is_large:
            self._try_policies(bounds)
        for recipe, most in _slow_recipes(self.placement, self.costs):
            if not self._is_below(self._bounds(self._deferrable(most))):
                self._try_recipe(recipe(self.placement.num_devices, self.num_microbatches))
        if self.is_large:
            self._try_policies(bounds)

    def _try_recipe(self, schedule: Schedule) -> None:
        """As it is, and with its backwards in halves."""
        if Kind.BACKWARD in schedule.kinds:
            self._try(schedule)
            schedule = in_halves(schedule)
        self._try_with_justification(schedule)

    def _try_policies(self, bounds: tuple[Number, Number]) -> None:
        first = _FIRST["line" if self.placement.shape == "line" else "vee"]
        policies = dict.fromkeys(first + _REST)
        passes = max(4, _EFFORT // (3 * self.placement.num_stages * self.num_microbatches))
        if self.is_large and self.limit is not None and _slow_recipes(self.placement, self.costs):
            passes = _FEW
        if self.placement.shape == "loop":
            passes = 0 if self.is_large else _FEW
        seen: set[Schedule] = set()
        for policy in islice(policies, passes):
            if self._is_below(bounds) or self._reaches(bounds):
                return
            schedule = greedy(self.placement, self.num_microbatches, self.costs, self.limit, policy)
            if schedule is not None and schedule not in seen:
                seen.add(schedule)
                self._try_with_justification(schedule)

    def _try_with_justification(self, schedule: Schedule) -> None:
        timeline = self._try(schedule)
        if timeline is None or Kind.BACKWARD in schedule.kinds:
            return
        assert self.best is not None
        far_behind = self._value(timeline)[0] > _HOPELESS * self._value(self.best)[0]
        if far_behind and self.is_large:
            return
        justified_too = self._try(justified(timeline, self.limit, ends_together=self.objective == "makespan"))
        if self.gains_by_fusing:
            for each in (timeline, justified_too):
                if each is not None:
                    self._try(fuse(each.schedule, self.costs))

    def polished(self) -> Timeline:
        """The best, justified again as long as that gains something."""
        for _ in range(2):
            before = self.best
            assert before is not None
            if Kind.BACKWARD not in before.schedule.kinds:
                self._try_with_justification(before.schedule)
            if self.best is before:
                break
        assert self.best is not None
        return self.best

    def _try(self, schedule: Schedule) -> Timeline | None:
        """What the schedule takes, if it fits."""
        if not fits(max(peaks(schedule, self.costs)), self.limit):
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

    def _bounds(self, deferrable: Iterable[Number]) -> tuple[Number, Number]:
        """What no schedule can be below if a device has at most so much work left after its last I, all of it W.

        device 0   |-- F down to r --|                                     |-- I up from r --|W|
        device r                     |-- all its work but what it defers --|-- deferred W --|
        """
        durations = self.costs.durations(self.placement)
        forward, inputs, weights, whole = (
            durations[kind] for kind in (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.BACKWARD)
        )
        handed_on = tuple(map(min, inputs, whole))
        both = tuple(map(min, map(add, inputs, weights), whole))
        between = self.costs.hops(self.placement)
        makespan: Number = 0
        span: Number = 0
        for stages, left in zip(self.placement.stages, deferrable, strict=True):
            first = stages[0]
            work = self.num_microbatches * sum(forward[s] + both[s] for s in stages)
            head = sum(forward[:first]) + sum(between[: first + 1])
            tail = both[0] + sum(handed_on[1:first]) + sum(between[: first + 1])
            makespan = max(makespan, head + work)
            span = max(span, work, head + work - left + tail if first else 0)
        return self._ranked(max(makespan, span), span)

    def _deferrable(self, most: int | None = None) -> Iterator[Number]:
        """Per device how much work in W it can put off at once, by the limit and, where given, at `most` so many W."""
        weights = self.costs.durations(self.placement)[Kind.WEIGHT_GRAD]
        sizes = self.costs.per_stage("kept_for_weight_grad", self.placement)
        for stages in self.placement.stages:
            work: Number = self.num_microbatches * sum(weights[s] for s in stages)
            if most is not None:
                work = min(work, most * max(weights[s] for s in stages))
            if self.limit is not None and all(sizes[s] for s in stages):
                work = min(work, self.limit * max(weights[s] / sizes[s] for s in stages))
            yield work


def _smallest_peak(costs: Costs, placement: Placement) -> Number:
    """One microbatch alone fills all stages of a device before any of them gives something back."""
    sizes = costs.per_stage("activation", placement)
    return max(sum(sizes[stage] for stage in stages) for stages in placement.stages)


def _cheaper_whole(costs: Costs, placement: Placement) -> set[int]:
    """The stages of which a whole backward costs less than its halves."""
    times = costs.durations(placement)
    parts = zip(times[Kind.BACKWARD], times[Kind.INPUT_GRAD], times[Kind.WEIGHT_GRAD], strict=True)
    return {stage for stage, (whole, inputs, weights) in enumerate(parts) if whole < inputs + weights}


def _ways_to_count(costs: Costs, placement: Placement) -> list[Costs]:
    """The costs, and where that makes a difference those in which a cheaper whole backward is all in its I."""
    whole = _cheaper_whole(costs, placement)
    if not whole:
        return [costs]
    times, stages = costs.durations(placement), range(placement.num_stages)
    kept = costs.per_stage("kept_for_weight_grad", placement)
    in_one = replace(
        costs,
        input_grad=[times[Kind.BACKWARD if stage in whole else Kind.INPUT_GRAD][stage] for stage in stages],
        weight_grad=[0 if stage in whole else times[Kind.WEIGHT_GRAD][stage] for stage in stages],
        kept_for_weight_grad=[0 if stage in whole else kept[stage] for stage in stages],
        backward=times[Kind.BACKWARD],
    )
    return [costs, in_one]


def _quick_recipes(placement: Placement) -> list[Callable[[int, int], Schedule]]:
    if placement.shape == "vee":
        return [vee.zb_v, vee.dualpipe_v]
    if placement.shape == "loop":
        return [loop.interleaved, loop.looped_bfs]
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
