"""A schedule without end: what is unrolled is the recipe, and correct however many minibatches come."""

from itertools import product

import pytest

from gapless.errors import ScheduleError
from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.asynchronous.endless import Endless, flow
from gapless.schedule.placement import line
from gapless.schedule.verify import verify


def by_hand(devices: int, microbatches: int, minibatches: int) -> list[list[Action]]:
    """Forwards first, then one forward and one backward; written from the definition."""
    total, rows = microbatches * minibatches, []
    for device in range(devices):
        row, begun = [], 0
        for ended in range(total):
            while begun < total and begun <= ended + devices - 1 - device:
                row.append(Action(device, Kind.FORWARD, begun))
                begun += 1
            row.append(Action(device, Kind.BACKWARD, ended))
            if (ended + 1) % microbatches == 0:
                row.append(Action(device, Kind.UPDATE, ended // microbatches))
        rows.append(row)
    return rows


@pytest.mark.parametrize(("devices", "microbatches"), [(1, 1), (2, 1), (3, 1), (5, 1), (2, 2), (3, 4), (4, 4), (4, 7)])
def test_unrolled_it_is_what_the_definition_says(devices: int, microbatches: int) -> None:
    endless = flow("any", [1] * devices, microbatches)
    for minibatches in range(1, 3 * devices + 2):
        unrolled = endless.unrolled(minibatches)
        assert [list(row) for row in unrolled.rows] == by_hand(devices, microbatches, minibatches)


@pytest.mark.parametrize("replicas", [each for count in (1, 2, 3) for each in product((1, 2, 3), repeat=count)])
def test_it_is_correct_for_every_number_of_minibatches(replicas: tuple[int, ...]) -> None:
    endless = flow("pipedream", replicas)
    reports = endless.verified()
    assert sorted(reports) == list(range(1, 3 * sum(replicas) + 1))
    assert all(report.ok for report in reports.values())


def test_the_period_is_as_long_as_what_comes_between_two_updates() -> None:
    endless = flow("2bw", [1, 1, 1], 4)
    assert endless.ahead == 1
    assert [len(row) for row in endless.period] == [9, 9, 9]  # four forwards, four backwards, an update
    assert [len(row) for row in endless.epilogue] == [3, 2, 0]
    assert endless.text().splitlines()[0] == (
        "0: 0F0 0F1 0F2 0B0 0F3 0B1 | 0F4 0B2 0F5 0B3 0U0 0F6 0B4 0F7 0B5 | 0B2 0B3 0U0"
    )


def test_a_forward_that_comes_before_the_update_that_it_needs_is_found() -> None:
    """As a schedule it is correct, but PipeDream's last stage is never ahead."""

    def row(text: str) -> tuple[tuple[Action, ...]]:
        return Schedule.parse(f"0: {text}").rows  # type: ignore[return-value]

    late = Endless(row("0F0 0F1"), row("0B0 0U0 0F2"), row("0B0 0U0 0B1 0U1"), 2, 1, 1, line(1), "one more ahead")
    assert verify(late.unrolled(5)).ok
    assert [violation.message for violation in late.verified()[3].violations] == [
        "0F1 finds version 0 of its weights, but it is to use version 1",
        "0F2 finds version 1 of its weights, but it is to use version 2",
    ]


def test_a_wrong_value_is_found() -> None:
    good = flow("pipedream", [1, 1])
    late = tuple((action for action in row if action.kind is not Kind.UPDATE) for row in good.period)
    bad = Endless(
        good.prologue, tuple(map(tuple, late)), good.epilogue, good.ahead, 1, 1, good.placement, "without updates"
    )
    assert not all(report.ok for report in bad.verified().values())


@pytest.mark.parametrize(
    ("replicas", "microbatches", "words"),
    [
        ((), 1, "every stage needs at least 1"),
        ((0, 1), 1, "every stage needs at least 1"),
        ((1, 1), 0, "has no update"),
        ((2, 1), 4, "replicas take minibatches of 1 microbatch"),
        ((1, 1, 1), 2, "shorter than the pipeline of 3 devices"),
    ],
)
def test_what_makes_no_schedule_is_refused(replicas: tuple[int, ...], microbatches: int, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        flow("any", replicas, microbatches)


def test_no_minibatches_make_no_schedule() -> None:
    with pytest.raises(ScheduleError, match="give at least 1"):
        flow("any", [1, 1]).unrolled(-1)
