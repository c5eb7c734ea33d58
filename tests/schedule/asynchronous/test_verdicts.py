"""Steps that follow each other: where each device waits for the verdict, and what a step then takes."""

import pytest

import gapless
from gapless.schedule.action import Kind, Schedule
from gapless.schedule.asynchronous.verdicts import warm_ups
from gapless.schedule.lower import consecutive
from gapless.schedule.recipes import make_schedule

TWO_STEPS = """\
0: 0F0 0F1 0B0 0B1 0U0 0F2 0F3 0V1 0B2 0B3 0U1
1: 1F0 1B0 1F1 1B1 1U0 1F2 1V1 1B2 1F3 1B3 1U1"""


def test_a_verdict_stands_before_the_first_backward_of_the_next_step() -> None:
    steps = consecutive(make_schedule("1f1b", devices=2, microbatches=2), 2)
    assert str(steps) == TWO_STEPS
    assert gapless.verify(Schedule.parse(TWO_STEPS)).ok


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "auto"])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_a_step_takes_its_span_where_the_next_one_does_not_wait(name: str, microbatches: int) -> None:
    schedule = make_schedule(name, devices=4, microbatches=microbatches)
    three, four = (gapless.simulate(consecutive(schedule, steps)) for steps in (3, 4))
    assert gapless.verify(consecutive(schedule, 3)).violations == ()
    assert four.makespan - three.makespan == gapless.simulate(schedule).span


def test_forwards_that_need_what_comes_after_a_verdict_wait_for_it_too() -> None:
    """1F1 could come before 1B0, but it needs 0F1, which comes after 0B0 on its device."""
    schedule = Schedule.parse("0: 0F0 0B0 0F1 0B1\n1: 1F0 1B0 1F1 1B1")
    assert warm_ups(schedule) == [1, 1]
    late = Schedule.parse("0: 0F0 0B0 0F1 0F2 0B1 0B2\n1: 1F0 1F1 1F2 2F0 2B0 1B0 2F1 2F2 2B1 1B1 2B2 1B2")
    assert warm_ups(late) == [1, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("0V1 0B2", "0B2 0V1"), "0B2 comes before the verdict on the update that it builds on, V1"),
        (("0F3 0V1", "0V1 0F3"), None),
        (("0F2 0F3 0V1", "0V1 0F2 0F3"), "1F2 comes before its verdict and needs 0F2, which comes after that of its"),
        (("1V1 ", ""), "1B2 comes before the verdict"),
    ],
)
def test_a_verdict_in_the_wrong_place_is_found(change: tuple[str, str], message: str | None) -> None:
    found = gapless.verify(Schedule.parse(TWO_STEPS.replace(*change))).violations
    assert [each.message for each in found if message and each.message.startswith(message)] or (
        not message and not found
    )


def test_verdicts_take_no_time_and_no_memory() -> None:
    schedule = make_schedule("zb-h2", devices=3, microbatches=6)
    timeline = gapless.simulate(consecutive(schedule, 2))
    assert timeline.peak == gapless.simulate(schedule).peak
    assert {end - start for action, start, end in timeline.all_spans if action.kind is Kind.VERDICT} == {0}
