"""The one rule, spelled out for every kind of action; and the replay that everything else is built on."""

import pytest

from gapless.errors import ScheduleError
from gapless.schedule import lower
from gapless.schedule.action import Action, Schedule, parse_action
from gapless.schedule.dependencies import DeadlockError, Milestones, completes, dependencies, replay
from gapless.schedule.recipes import RECIPES, make_schedule

THREE = make_schedule("1f1b", devices=3, microbatches=2)


def needs(action: str, schedule: Schedule = THREE) -> str:
    return " ".join(map(str, dependencies(parse_action(action), schedule)))


@pytest.mark.parametrize(
    ("action", "needed"),
    [
        ("0F1", ""),
        ("1F1", "0F1"),
        ("2B1", "2F1"),
        ("1B1", "1F1 2I1"),
        ("0I1", "0F1 1I1"),
        ("1W1", "1I1"),
        ("1R1", "1F1"),
        ("1U0", "1W0 1W1"),
    ],
)
def test_what_an_action_needs(action: str, needed: str) -> None:
    assert needs(action) == needed


def test_a_backward_stands_for_its_two_halves() -> None:
    assert " ".join(map(str, completes(parse_action("1B0")))) == "1I0 1W0"
    assert completes(parse_action("1I0")) == (parse_action("1I0"),)


def test_a_recompute_is_needed_where_there_is_one() -> None:
    schedule = Schedule.parse("0: 0F0 0F1 0R0 0B0 0B1")
    assert needs("0B0", schedule) == "0F0 0R0"
    assert needs("0B1", schedule) == "0F1"


def test_written_transfers_are_needed_too() -> None:
    schedule = lower.add_transfers(make_schedule("1f1b", devices=2, microbatches=1))
    assert needs("1F0", schedule) == "0F0 0SEND_F0 1RECV_F0"
    assert needs("0B0", schedule) == "0F0 1I0 1SEND_B0 0RECV_B0"
    assert needs("0SEND_F0", schedule) == "0F0"
    assert needs("1SEND_B0", schedule) == "1I0"
    assert needs("1RECV_F0", schedule) == ""


def test_an_update_needs_the_microbatches_of_its_own_minibatch() -> None:
    schedule = make_schedule("2bw", devices=2, microbatches=2, minibatches=3)
    assert needs("1U1", schedule) == "1W2 1W3"


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_replay_runs_every_action_once_after_what_it_needs(name: str) -> None:
    schedule = make_schedule(name, devices=3, microbatches=5)
    there: set[Action] = set()
    count = 0
    for device, action, _, _ in replay(schedule):
        assert action in schedule.rows[device]
        assert there.issuperset(dependencies(action, schedule))
        there.update(completes(action))
        count += 1
    assert count == schedule.num_actions


def test_every_milestone_has_a_number_of_its_own() -> None:
    schedule = make_schedule("zb-h1", devices=2, microbatches=3)
    milestones = Milestones(schedule)
    for _, action, _, gives in replay(schedule, milestones):
        assert tuple(milestones.action(base + action.microbatch) for base in gives) == completes(action)


def test_a_deadlock_says_where_every_device_stands() -> None:
    schedule = Schedule.parse("0: 0F0 0B0 0F1 0B1\n1: 1F1 1F0 1B0 1B1")
    with pytest.raises(DeadlockError) as caught:
        list(replay(schedule))
    assert str(caught.value) == (
        "the schedule can't be run to its end: device 0 stands before 0B0 and waits for 1I0; "
        "device 1 stands before 1F1 and waits for 0F1"
    )
    assert caught.value.blocked == {
        0: (1, parse_action("0B0"), parse_action("1I0")),
        1: (0, parse_action("1F1"), parse_action("0F1")),
    }


def test_a_few_actions_with_large_numbers_do_not_fill_the_memory() -> None:
    # 10,000 actions, each of another stage and microbatch, once asked for a table of 900 million entries.
    schedule = Schedule.parse("0: " + " ".join(f"{n}F{n}" for n in range(10_000)))
    with pytest.raises(ScheduleError) as caught:
        Milestones(schedule)
    assert str(caught.value) == (
        "the schedule has 10,000 actions for 10,000 stages and 10,000 microbatches, "
        "but every stage runs every microbatch: at least 100,000,000 forwards"
    )
