"""Updates that a schedule writes out: on the replica that has the gradient, in order, and not after the next one's."""

import pytest

from gapless.errors import ScheduleError
from gapless.schedule import lower
from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.placement import line
from gapless.schedule.recipes import make_schedule
from gapless.schedule.simulate import simulate
from gapless.schedule.verify import verify

REPLICAS = """\
0: 0F0 0B0 0U0 0F2 0B2 0U2
1: 0F1 0B1 0U1 0F3 0B3 0U3"""


def found(drawing: str) -> list[str]:
    return [f"{v.device}.{v.position} {v.rule}: {v.message}" for v in verify(Schedule.parse(drawing)).violations]


def test_updates_where_their_gradients_are_and_in_order_are_correct() -> None:
    assert found(REPLICAS) == []
    for replicas in ((2, 1), (1, 2), (3, 1), (2, 2)):
        assert verify(make_schedule("pipedream", devices=sum(replicas), microbatches=7, replicas=replicas)).ok
    assert verify(make_schedule("2bw", devices=3, microbatches=4, minibatches=3)).ok


@pytest.mark.parametrize(
    ("drawing", "violations"),
    [
        # Each of these was accepted.
        (
            "0: 0F0 0B0 0U1\n1: 0F1 0B1 0U0",
            [
                "0.2 placement: 0U1 is on device 0, but stage 0 has microbatch 1, whose gradient it takes, on device 1",
                "1.2 order: 0U0 comes after 0B1, so the gradient of minibatch 1 would be in the update of minibatch 0",
                "1.2 placement: 0U0 is on device 1, but stage 0 has microbatch 0, whose gradient it takes, on device 0",
            ],
        ),
        (
            "0: 0F0 0B0 0U0 0U1\n1: 0F1 0B1",
            ["0.3 placement: 0U1 is on device 0, but stage 0 has microbatch 1, whose gradient it takes, on device 1"],
        ),
        (
            "0: 0F0 0B0 0F1 0B1 0U1 0U0",
            ["0.5 order: 0U0 comes after 0U1, but a stage is updated in the order of its minibatches"],
        ),
        (
            "0: 0F0 0B0 0F1 0B1 0U0 0U1",
            ["0.4 order: 0U0 comes after 0B1, so the gradient of minibatch 1 would be in the update of minibatch 0"],
        ),
        (
            "0: 0F0 0I0 0F1 0I1 0W0 0W1 0U0 0U1",
            ["0.6 order: 0U0 comes after 0W1, so the gradient of minibatch 1 would be in the update of minibatch 0"],
        ),
        (
            "0: 0F0 0B0 0F1 0B1\n1: 0F2 0B2 0F3 0B3 0U1 0U0",
            [
                "1.5 order: 0U0 comes after 0U1, but a stage is updated in the order of its minibatches",
                (
                    "1.5 placement: 0U0 is on device 1, but stage 0 has microbatches 0 to 1, whose gradient it takes, "
                    "on device 0"
                ),
            ],
        ),
        (
            "0: 0F0 0B0\n1: 0F1 0B1 0U0 0F2 0B2 0F3 0B3 0U1",
            [
                (
                    "1.2 placement: 0U0 is on device 1, but stage 0 has microbatches 0 to 1, whose gradient it takes, "
                    "on devices 0 and 1: of several minibatches each is on one device"
                ),
            ],
        ),
        # These were an IndexError.
        (
            "0: 0F0 0B0 1U0",
            [
                "0.1 dependency: 0B0 waits for 1I0, which is missing",
                "0.3 complete: 1F0 is missing",
                "0.3 complete: 1B0 is missing",
                "0.3 complete: 0U0 is missing",
            ],
        ),
        (
            "0: 0F1\n1: 0F0 0U2",
            [
                (
                    "1.1 complete: 2 microbatches can't be shared by updates 0 to 2: "
                    "each minibatch has as many as the others"
                ),
                "1.2 complete: 0U0 is missing",
                "1.2 complete: 0U1 is missing",
            ],
        ),
    ],
)
def test_an_update_that_takes_no_or_a_wrong_gradient_is_refused(drawing: str, violations: list[str]) -> None:
    assert found(drawing) == violations


def test_a_stage_with_updates_alone_can_not_be_simulated_either() -> None:
    with pytest.raises(ScheduleError, match=r"device 0 stands before 1U0 and waits for 1W0"):
        simulate(Schedule.parse("0: 1U0 0F0 0B0"))
    with pytest.raises(ScheduleError, match="stage 0 has no action"):
        Schedule.parse("0: 0U0")


def test_a_minibatch_on_several_replicas_is_updated_once_on_one_of_them() -> None:
    schedule = Schedule.parse("0: 0F0 0B0\n1: 0F1 0B1\n2: 1F0 1B0 1F1 1B1")
    written = lower.add_updates(schedule)
    assert written.text() == "0: 0F0 0B0\n1: 0F1 0B1 0U0\n2: 1F0 1B0 1F1 1B1 1U0"
    assert verify(written).ok


def test_rows_with_another_schedules_placement_are_refused() -> None:
    row = (Action(0, Kind.FORWARD, 0), Action(2, Kind.FORWARD, 0))
    with pytest.raises(ScheduleError, match=r"the schedule has 2F0, but its placement is for stages 0 to 0"):
        verify(Schedule((row,), line(1)))
    with pytest.raises(ScheduleError, match=r"rows for 1 device, but its placement is for 2"):
        verify(Schedule((row,), line(2)))


def test_updates_with_large_numbers_are_refused_at_once() -> None:
    # 300 stages and update 60,000 were a table of 18 million, and larger numbers one that fills the memory.
    forwards = " ".join(f"{stage}F0" for stage in range(300))
    with pytest.raises(ScheduleError, match=r"300 stages and 60,001 microbatches"):
        verify(Schedule.parse(f"0: {forwards} {'0F0 ' * 60_000} 0U60000"))
