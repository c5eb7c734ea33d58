"""What devices cost each other: found from what was measured, and put back into the schedule that is planned."""

import random

import pytest

from gapless.plan.profile.contention import Beside, Span, beside, fitted, in_company
from gapless.plan.profile.profile import ALONE, Company, Lost
from gapless.schedule.costs import Costs
from gapless.schedule.recipes import make_schedule
from gapless.schedule.simulate import simulate


def test_what_runs_beside_a_span_is_counted_for_each_other_device() -> None:
    rows = [
        [Span(0, 4, True), Span(4, 8, False)],
        [Span(2, 6, False)],
        [Span(3, 5, True)],
    ]
    assert beside(rows) == [
        [Beside(1, 2), Beside(1, 2)],
        [Beside(2 + 2, 2)],
        [Beside(1, 1 + 2)],
    ]


def measured(forward: Lost, backward: Lost) -> list[list[Span]]:
    """Two devices that run forward and backward by turns, each with breaks of its own, and lose these shares."""
    chance, step = random.Random(0), 1e-3
    rows: list[list[Span]] = [[], []]
    kinds, left, begin = [True, False], [1.0, 2.0], [0.0, 0.3]
    now = 0.0
    while len(rows[0]) < 200:
        running = [now >= each for each in begin]
        before = list(kinds)
        for device, other in ((0, 1), (1, 0)):
            if not running[device]:
                continue
            lost = forward if kinds[device] else backward
            share = (lost.by_forward if before[other] else lost.by_backward) if running[other] else 0.0
            left[device] -= step * (1 - share)
            if left[device] <= 0:
                rows[device].append(Span(begin[device], now + step, kinds[device], 1.0 if kinds[device] else 2.0))
                kinds[device] = not kinds[device]
                left[device] = 1.0 if kinds[device] else 2.0
                begin[device] = now + step + chance.random()
        now += step
    return rows


def paused(rows: list[list[Span]], at: float) -> list[list[Span]]:
    """All of it stood still for a while."""

    def later(time: float) -> float:
        return time + 100 if time > at else time

    return [[span._replace(begin=later(span.begin), end=later(span.end)) for span in row] for row in rows]


@pytest.mark.parametrize("pauses", [(), (50.0, 300.0)], ids=["in peace", "with the machine busy elsewhere"])
def test_the_shares_are_found_from_what_was_measured(pauses: tuple[float, ...]) -> None:
    forward, backward = Lost(0.4, 0.1), Lost(0.2, 0.0)
    rows = measured(forward, backward)
    for at in pauses:
        rows = paused(rows, at)
    assert fitted(rows, forward=True) == pytest.approx(forward, abs=0.05)
    assert fitted(rows, forward=False) == pytest.approx(backward, abs=0.05)


def test_devices_in_step_tell_one_share_and_not_two() -> None:
    rows = [[Span(2 * n, 2 * n + 1.25, True, 1.0) for n in range(20)] for _ in range(2)]
    found = fitted(rows, forward=True)
    assert found.by_forward == pytest.approx(0.2)
    assert found.by_backward == pytest.approx(0.2)
    assert fitted(rows, forward=False) == Lost()


def test_alone_nothing_is_lost() -> None:
    schedule, costs = make_schedule("1f1b", devices=2, microbatches=4), Costs(forward=(1, 2), backward=(2, 3))
    assert in_company(costs, schedule, ALONE) is costs
    one = make_schedule("1f1b", devices=1, microbatches=4)
    assert in_company(Costs(), one, Company(Lost(0.5, 0.5), Lost(0.5, 0.5))) == Costs()


def test_only_what_meets_is_slower() -> None:
    # With one microbatch no two devices ever run at the same time.
    company = Company(Lost(0.5, 0.5), Lost(0.5, 0.5), Lost(0.5, 0.5))
    lonely = make_schedule("gpipe", devices=2, microbatches=1)
    assert simulate(lonely, in_company(Costs(), lonely, company)).makespan == simulate(lonely, Costs()).makespan
    # With two devices that are busy all the time, all but the ends takes twice as long.
    busy = make_schedule("gpipe", devices=2, microbatches=64)
    ratio = simulate(busy, in_company(Costs(), busy, company)).makespan / simulate(busy, Costs()).makespan
    assert 1.9 < ratio < 2.0


def test_more_devices_than_processors_take_turns() -> None:
    # All four want to run all the time but at the ends, and two can.
    busy = make_schedule("gpipe", devices=4, microbatches=64)
    plain = simulate(busy, Costs()).makespan
    assert 1.8 < simulate(busy, in_company(Costs(), busy, Company(at_once=2.0))).makespan / plain < 2.0
    assert simulate(busy, in_company(Costs(), busy, Company(at_once=4.0))).makespan == plain
    # Of replicas on the same processors each has less than one.
    lonely = make_schedule("gpipe", devices=2, microbatches=1)
    ratio = simulate(lonely, in_company(Costs(), lonely, Company(at_once=0.5))).makespan / simulate(lonely).makespan
    assert ratio == pytest.approx(2.0)
    # What those who run at once cost each other comes on top, and is not that of all four.
    company = Company(Lost(0.2, 0.2), Lost(0.2, 0.2), Lost(0.2, 0.2), at_once=2.0)
    assert 2.2 < simulate(busy, in_company(Costs(), busy, company)).makespan / plain < 2.5


def test_forwards_beside_forwards_are_what_gpipe_has_and_1f1b_has_not() -> None:
    company = Company(forward=Lost(0.5, 0.0))
    costs = Costs(forward=1, backward=1)

    def longer(name: str) -> float:
        schedule = make_schedule(name, devices=2, microbatches=16)
        return float(simulate(schedule, in_company(costs, schedule, company)).makespan) / float(
            simulate(schedule, costs).makespan
        )

    assert longer("gpipe") > 1.4
    assert longer("1f1b") < 1.1
