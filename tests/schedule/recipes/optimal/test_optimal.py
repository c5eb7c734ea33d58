"""`optimal` against brute force, known optima and our own simulator; and what it does when it can't finish."""

import os
import random
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise, product

import pytest

from gapless.errors import ConfigError, ScheduleError
from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.costs import Costs, Number
from gapless.schedule.dependencies import dependencies
from gapless.schedule.memory import peaks
from gapless.schedule.placement import Placement, explicit, line, loop, replicated, vee
from gapless.schedule.recipes import RECIPES, build, make_schedule, solve
from gapless.schedule.recipes.optimal.optimal import Optimum, SolverProgress, optimal
from gapless.schedule.recipes.request import Request
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Objective

TRANSFORMER = Costs(1.0, 1.0, 0.75, latency=0.03)
ZERO_BUBBLE = """\
0: 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
1: 1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
2: 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3"""


def all_rows(actions: Sequence[Action], whole_too: bool) -> Iterator[tuple[Action, ...]]:
    """Every order of a device's F, I and W, each kind by microbatch; and `whole_too` with any backwards whole."""
    stages = max(action.stage for action in actions) + 1
    graph = Schedule.of([actions], explicit(1, [[0]] * stages))

    def orders(left: frozenset[Action]) -> Iterator[tuple[Action, ...]]:
        if not left:
            yield ()
        for action in sorted(left):
            halves = {action}
            if whole_too and action.kind is Kind.INPUT_GRAD:
                halves.add(Action(action.stage, Kind.WEIGHT_GRAD, action.microbatch))
            for done in {frozenset({action}), frozenset(halves)}:
                needs = {need for each in done for need in dependencies(each, graph)} - done
                earlier = {a for each in done for a in left if a[:2] == each[:2] and a.microbatch < each.microbatch}
                if not earlier and left.isdisjoint(needs):
                    made = action if len(done) == 1 else Action(action.stage, Kind.BACKWARD, action.microbatch)
                    yield from ((made, *rest) for rest in orders(left - done))

    return orders(frozenset(actions))


def all_schedules(placement: Placement, num_microbatches: int, whole_too: bool) -> Iterator[Schedule]:
    """Every order there is: per device the interleavings of its chains, and all combinations of those."""
    actions = [
        Action(s, Kind(k), m) for m in range(num_microbatches) for s in range(placement.num_stages) for k in "FIW"
    ]
    rows = []
    for device in range(placement.num_devices):
        local = [a for a in actions if placement.device(a.stage, a.microbatch) == device]
        rows.append(list(all_rows(local, whole_too)))
    return (Schedule(made, placement) for made in product(*rows))


def brute_force(placement: Placement, M: int, costs: Costs, limit: Number | None) -> dict[Objective, Number]:
    found: list[tuple[Number, Number]] = []
    for schedule in all_schedules(placement, M, costs.backward is not None):
        if limit is None or max(peaks(schedule, costs)) <= limit:
            try:
                timeline = simulate(schedule, costs)
            except ScheduleError:
                continue  # an order that would hang
            found.append((timeline.makespan, timeline.span))
    return {"makespan": min(makespan for makespan, _ in found), "span": min(span for _, span in found)}


def check(optimum: Optimum, costs: Costs, objective: Objective, limit: Number | None) -> None:
    """All that is promised of any answer."""
    timeline = simulate(optimum.schedule, costs)
    assert getattr(timeline, objective) == optimum.value
    assert optimum.bound <= optimum.value
    assert optimum.gap == pytest.approx(float((optimum.value - optimum.bound) / optimum.value))
    assert limit is None or max(timeline.peak) <= limit + 1e-9
    chains: dict[tuple[int, int, Kind], list[int]] = defaultdict(list)
    for device, row in enumerate(optimum.schedule.rows):
        for stage, kind, microbatch in row:
            chains[device, stage, kind].append(microbatch)
    assert all(numbers == sorted(numbers) for numbers in chains.values())


def test_one_device_never_waits() -> None:
    optimum = optimal(line(1), 3, Costs(1, 2, 3), memory_limit=1)
    assert (optimum.value, optimum.bound, optimum.gap, optimum.proven) == (18, 18, 0, True)
    assert str(optimum.schedule) == "0: 0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2"
    assert optimum.schedule.name == "optimal"


@pytest.mark.parametrize(
    ("placement", "num_microbatches", "costs", "limit"),
    [
        (line(2), 2, Costs(), None),
        (line(2), 3, Costs(), 1),
        (line(2), 3, Costs(), 2),
        (line(2), 3, Costs([1, 2], [3, 1], [2, 2], latency=Fraction(1, 3)), 2),
        (line(2), 3, Costs(2, 3, 1, latency=1, activation=4, kept_for_weight_grad=1), 6),
        (line(2), 3, Costs([1, 0], [1, 2], [0, 1], latency=0.5), 2),
        (line(3), 2, Costs([1, 2, 1], [2, 2, 3], [1, 1, 2], latency=0.25), 1),
        (vee(2), 1, Costs([1, 2, 1, 3], 2, [1, 2, 3, 4], latency=0.1), None),
        (loop(2, 2), 1, Costs(2, 4, [1, 2, 3, 4], latency=1), 1),
        (replicated([2, 1]), 3, Costs([4, 1], [4, 1], [2, 1], latency=0.5), 2),
        (line(2), 2, Costs(backward=1), None),
        (line(2), 2, Costs(2, [3, 1], [2, 4], backward=[4, 3.5], latency=0.5), 2),
        (line(2), 2, Costs([1, 0], [2, 0], 1, backward=[2.5, 1], kept_for_weight_grad=0.5), 1),
        (line(3), 1, Costs(1, 3, 2, backward=2.5, latency=1), None),
        (vee(2), 1, Costs([1, 2, 1, 3], 2, [1, 2, 3, 4], backward=[2, 5, 4, 5.5], latency=0.1), None),
        (loop(2, 2), 1, Costs(2, 4, [1, 2, 3, 4], backward=[2.75, 3, 6, 6], latency=1), 1),
    ],
)
def test_the_value_is_that_of_brute_force(
    placement: Placement, num_microbatches: int, costs: Costs, limit: Number | None
) -> None:
    for objective, best in brute_force(placement, num_microbatches, costs, limit).items():
        optimum = optimal(placement, num_microbatches, costs, memory_limit=limit, objective=objective)
        check(optimum, costs, objective, limit)
        assert float(optimum.value) == pytest.approx(float(best), abs=1e-12)
        assert optimum.proven


def test_a_backward_is_whole_where_that_costs_less_and_nobody_waits() -> None:
    """At K = M = 2 and costs of 1, also of a whole backward, 6.5 was called proven; 1f1b takes 6."""
    found = solve(Request(2, 2, None, Costs(backward=1)))
    assert (found.value, found.proven) == (5, True)
    assert Kind.BACKWARD in found.schedule.kinds
    mixed = optimal(line(2), 2, Costs(1, 1, 1, backward=1.75), hint=make_schedule("1f1b", devices=2, microbatches=2))
    assert (mixed.value, mixed.proven) == (7, True)  # also with halves alone, so the solver may choose either
    assert {Kind.INPUT_GRAD, Kind.WEIGHT_GRAD} <= mixed.schedule.kinds


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(s, marks=pytest.mark.slow) for s in range(6, 150))])
def test_no_recipe_of_the_same_memory_is_below_what_is_proven_nor_below_auto(seed: int) -> None:
    draw = random.Random(seed)
    large = seed >= 12
    devices, microbatches = draw.randint(2, 3 if large else 2), draw.randint(1, 4 if large else 3)
    stages_per_device = draw.choice((None, None, 1, 2))
    stages = devices * (stages_per_device or draw.choice((1, 2)))
    listed = draw.random() < 0.5

    def cost() -> list[float] | float:
        numbers = [draw.randint(0, 8) / draw.choice((1, 2, 4)) for _ in range(stages)]
        return numbers if listed else numbers[0]

    inputs, weights = cost(), cost()
    share = draw.choice((None, 1.0, 0.9, 0.75, 0.5))
    pairs = zip(inputs, weights, strict=True) if isinstance(inputs, list) and isinstance(weights, list) else None
    backward = None
    if share is not None:
        backward = [share * (i + w) for i, w in pairs] if pairs else share * (inputs + weights)  # type: ignore[operator]
    costs = Costs(
        cost(),
        inputs,
        weights,
        backward=backward,
        latency=draw.choice((0, 0, 0.25, 1)),
        kept_for_weight_grad=draw.choice((None, None, 0.5, 0)),
    )
    limit = draw.choice((None, "1x", "2x", sum(costs.per_stage("activation", vee(devices))) if not listed else None))
    objective: Objective = draw.choice(("makespan", "span"))
    request = Request(devices, microbatches, stages_per_device, costs, limit, objective, time_limit=20)
    found, best = solve(request), simulate(build("auto", request), costs)
    check(found, costs, objective, request.limit)
    for name, recipe in RECIPES.items():
        if not recipe.synchronous or name in ("auto", "optimal"):
            continue
        try:
            other = simulate(build(name, request), costs)
        except ConfigError:
            continue  # another number of stages
        if request.limit is None or max(other.peak) <= request.limit:
            assert getattr(other, objective) >= found.bound - 1e-9, name
            assert getattr(other, objective) >= getattr(best, objective) - 1e-9, name
    assert getattr(best, objective) >= found.value - 1e-9


@pytest.mark.parametrize(
    ("placement", "costs", "limit", "objective", "value"),
    [
        (line(4), Costs(), 4, "makespan", 27),
        (line(4), Costs(), 4, "span", 27),
        (line(4), Costs(), 8, "span", 24),
        (vee(4), Costs(), 8, "makespan", 25.5),
        (line(4), TRANSFORMER, 4, "makespan", 26.11),
        (line(4), TRANSFORMER, 8, "makespan", 25.09),
        (line(4), TRANSFORMER, 8, "span", 22.93),
        (vee(4), TRANSFORMER, 8, "makespan", 23.59),
    ],
)
def test_four_devices_and_eight_microbatches_are_proven(
    placement: Placement, costs: Costs, limit: int, objective: Objective, value: float
) -> None:
    optimum = optimal(placement, 8, costs, memory_limit=limit, objective=objective)
    check(optimum, costs, objective, limit)
    assert optimum.proven
    assert float(optimum.value) == pytest.approx(value, abs=1e-9)


def test_more_memory_takes_less_time_until_it_is_enough() -> None:
    values = [optimal(line(3), 4, Costs(), memory_limit=limit).value for limit in (1, 2, 3, None)]
    assert values == [28, 17, 14, 14]


def test_what_an_input_gradient_gives_back_makes_room() -> None:
    tight = Costs(activation=4, kept_for_weight_grad=4)
    loose = Costs(activation=4, kept_for_weight_grad=1)
    assert optimal(line(3), 4, tight, memory_limit=9).value == 17
    assert optimal(line(3), 4, loose, memory_limit=9).value == 16


def test_a_limit_below_one_microbatch_is_refused_with_the_smallest_that_fits() -> None:
    message = (
        r"no schedule fits a memory limit of 2\.5: one microbatch alone takes 3 on device 1, so that is the smallest"
    )
    with pytest.raises(ScheduleError, match=message):
        optimal(line(2), 2, Costs(activation=[1, 3]), memory_limit=2.5)
    assert optimal(line(2), 2, Costs(activation=[1, 3]), memory_limit=3).proven
    with pytest.raises(ScheduleError, match=r"takes 1 on device 0"):  # a vee's device holds two stages at once
        optimal(vee(2), 2, memory_limit=0.5)


def test_a_hint_that_is_the_optimum_already_comes_back_at_once() -> None:
    hint = Schedule.parse(ZERO_BUBBLE)
    optimum = optimal(line(3), 4, memory_limit=3, hint=hint)
    assert optimum.schedule == hint
    assert optimum.proven
    assert optimum.value == simulate(hint).makespan == 14


def test_the_result_is_never_worse_than_the_hint() -> None:
    costs = Costs(0.9, 1.1, 0.7, latency=0.05)
    hint = Schedule.parse(ZERO_BUBBLE)
    for objective in ("makespan", "span"):
        optimum = optimal(line(3), 4, costs, memory_limit=3, objective=objective, hint=hint, time_limit=0.01)
        check(optimum, costs, objective, 3)
        assert optimum.value <= getattr(simulate(hint, costs), objective)


@pytest.mark.parametrize(
    "hint",
    [
        "0: 0F0 0F1 0I1 0W1 0I0 0W0\n1: 1F0 1F1 1I1 1W1 1I0 1W0",  # backwards out of order
        "0: 0F0 0F1 0I0 0W0\n1: 1F0 1I0 1W0 1F1",  # incomplete
        "0: 0F0 0F1 0I0 0W0 0I1 0W1\n1: 1F0 1F1 1I0 1W0 1I1 1W1",  # above the limit
        "0: 0F0 0I0 0W0 0F1 0I1 0W1\n1: 1F0 1F1 1I0 1W0 1W1 1I1",  # would hang
        "0: 0F0 0I0 0W0 0F1 0I1 0W1",  # another number of devices
    ],
)
def test_a_hint_that_breaks_the_rules_is_passed_over(hint: str) -> None:
    optimum = optimal(line(2), 2, memory_limit=1, hint=Schedule.parse(hint))
    check(optimum, Costs(), "makespan", 1)
    assert (optimum.value, optimum.proven) == (10, True)


def test_a_hint_may_have_whole_backwards() -> None:
    hint = Schedule.parse("0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1")
    optimum = optimal(line(2), 2, hint=hint)
    assert optimum.value <= simulate(hint).makespan
    assert optimum.schedule.kinds == {Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD}


def test_costs_too_fine_for_whole_numbers_keep_the_bound_below_the_value() -> None:
    costs = Costs([1.0000000000001, 1 / 3], [0.7, 1.1e-9], [2 / 7, 0.9], latency=0.123456789012345)
    for objective, best in brute_force(line(2), 3, costs, 2).items():
        optimum = optimal(line(2), 3, costs, memory_limit=2, objective=objective)
        check(optimum, costs, objective, 2)
        assert optimum.proven
        assert float(optimum.value) == pytest.approx(float(best), rel=1e-6)
        assert float(optimum.bound) <= float(best) * (1 + 1e-12)


def test_with_a_bandwidth_the_bound_stays_below_every_schedule() -> None:
    costs = Costs(latency=0.1, boundary=1, bandwidth=0.5)
    optimum = optimal(line(2), 3, costs, memory_limit=2)
    check(optimum, costs, "makespan", 2)
    assert float(optimum.bound) <= float(brute_force(line(2), 3, costs, 2)["makespan"])


def test_when_the_time_is_up_there_is_a_schedule_and_a_gap() -> None:
    began = time.monotonic()
    optimum = optimal(vee(8), 24, TRANSFORMER, memory_limit=5, objective="span", time_limit=1)
    assert time.monotonic() - began < 30
    check(optimum, TRANSFORMER, "span", 5)
    assert 0 < optimum.gap < 1
    assert not optimum.proven
    assert optimum.bound >= simulate(optimum.schedule, TRANSFORMER).work - 1e-9


def test_progress_tells_better_values_and_bounds_in_the_callers_thread() -> None:
    heard: list[SolverProgress] = []
    threads = set()

    def progress(news: SolverProgress) -> None:
        heard.append(news)
        threads.add(threading.current_thread())

    optimum = optimal(line(4), 8, TRANSFORMER, memory_limit=4, progress=progress)
    assert threads == {threading.current_thread()}
    assert heard
    for earlier, later in pairwise(heard):
        assert later.seconds >= earlier.seconds
        assert later.value <= earlier.value
        assert later.bound >= earlier.bound
    assert float(heard[-1].value) == pytest.approx(float(optimum.value))


def test_an_error_in_progress_ends_the_search() -> None:
    def progress(news: SolverProgress) -> None:
        raise ZeroDivisionError

    began = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        optimal(vee(3), 6, TRANSFORMER, memory_limit=3, progress=progress)
    assert time.monotonic() - began < 60


def test_ctrl_c_stops_the_search() -> None:
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        optimal(vee(8), 24, TRANSFORMER, memory_limit=5, objective="span")
    assert time.monotonic() - began < 30
    timer.join()


def test_without_or_tools_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ortools", "ortools.sat", "ortools.sat.python", "ortools.sat.python.cp_model"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install gapless\[optimal\]"):
        optimal(line(2), 2)


def test_a_search_without_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="time_limit is 0 seconds, but a search needs more than 0"):
        make_schedule("optimal", devices=2, microbatches=2, time_limit=0)
