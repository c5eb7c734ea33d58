"""The numbers of a timeline: makespan and span, both bubbles, busy and idle time, and the steady pace."""

from fractions import Fraction

import pytest

from gapless.schedule.action import Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.recipes import make_schedule
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline, costs_of, plain

TWO = Schedule.parse("0: 0F0 0B0\n1: 1F0 1B0")


def test_makespan_is_of_all_devices_and_span_of_one() -> None:
    # A measured timeline: its clock does not start at 0.
    timeline = Timeline(TWO, ((10, 16), (12, 13)), ((11, 19), (13, 15)))
    assert timeline.makespan == 9
    assert timeline.span == 9
    assert timeline.busy == (4, 3)
    assert timeline.idle == (5, 6)
    assert timeline.work == 4
    assert timeline.bubble == pytest.approx(5 / 9)


def test_the_two_bubbles_differ_where_a_device_starts_late() -> None:
    timeline = simulate(make_schedule("zb-v", devices=4, microbatches=8), Costs(*[Fraction(1)] * 3))
    assert timeline.bubble == Fraction(3, 51)
    assert timeline.span_bubble == 0


def test_the_work_is_that_of_the_busiest_device() -> None:
    timeline = simulate(make_schedule("gpipe", devices=2, microbatches=4), Costs(forward=[1, 5]))
    assert timeline.work == 28
    assert timeline.idle[1] == timeline.makespan - 28


def test_a_free_schedule_has_no_bubble() -> None:
    timeline = simulate(TWO, Costs(0, 0, 0))
    assert timeline.makespan == timeline.bubble == timeline.span_bubble == 0


def test_the_period_is_the_steady_pace() -> None:
    assert simulate(make_schedule("pipedream", devices=4, microbatches=16)).period == 3
    assert simulate(make_schedule("2bw", devices=4, microbatches=8, minibatches=8)).period == 24
    # Two or three minibatches once were said to take the makespan by their number, filling and draining included.
    for minibatches in (2, 3):
        assert simulate(make_schedule("2bw", devices=4, microbatches=8, minibatches=minibatches)).period == 24
    once = simulate(make_schedule("1f1b", devices=4, microbatches=8))
    assert once.period == once.makespan


def test_minibatches_of_different_sizes_still_have_an_end() -> None:
    # 5 microbatches under 2 updates once were an IndexError.
    schedule = Schedule.parse("0: 0F0 0B0 0F1 0B1 0U0 0F2 0B2 0F3 0B3 0F4 0B4 0U1")
    assert simulate(schedule).minibatch_ends == (6, 15)


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (2, 2),
        (2.0, 2),
        (Fraction(51, 2), 25.5),
        (0.1 + 0.2, 0.3),
        (24.000000000000004, 24),
        (1.5e-14, 1.5e-14),
        (0, 0),
    ],
)
def test_plain_numbers_lose_noise_and_nothing_else(number: float, shown: float) -> None:
    # Rounding to 12 places once turned costs in picoseconds into 0.
    assert plain(number) == shown
    assert type(plain(number)) is type(shown)


def test_costs_of_one_timeline_are_those_of_a_list_of_it() -> None:
    timeline = simulate(make_schedule("1f1b", devices=2, microbatches=2))
    assert costs_of(timeline) == costs_of([timeline])
