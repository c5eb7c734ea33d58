"""The simulator against times worked out by hand, and against itself with transfers written out."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.errors import ConfigError, ScheduleError
from gapless.schedule import lower
from gapless.schedule.action import Action, Schedule
from gapless.schedule.costs import Costs, Number
from gapless.schedule.recipes import RECIPES, make_schedule
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline, plain
from tests.schedule.strategies import times

NAMED = sorted(name for name in RECIPES if name not in ("auto", "optimal"))


def intervals(timeline: Timeline, device: int) -> str:
    return " ".join(f"{action}:{plain(start)}-{plain(end)}" for action, start, end in timeline.spans(device))


def compute(timeline: Timeline) -> dict[Action, tuple[Number, Number]]:
    """When each action that takes time of a device ran."""
    return {
        action: (start, end)
        for device in range(timeline.schedule.num_devices)
        for action, start, end in timeline.spans(device)
        if "_" not in action.kind
    }


def test_each_action_starts_when_its_device_is_free_and_its_needs_are_there() -> None:
    timeline = simulate(make_schedule("1f1b", devices=2, microbatches=2), Costs(1, 2, 3))
    assert intervals(timeline, 0) == "0F0:0-1 0F1:1-2 0B0:7-12 0B1:13-18"
    assert intervals(timeline, 1) == "1F0:1-2 1B0:2-7 1F1:7-8 1B1:8-13"


def test_latency_is_paid_between_devices_only() -> None:
    timeline = simulate(make_schedule("zb-v", devices=2, microbatches=1), Costs(2, 2, 2, latency=10))
    assert intervals(timeline, 0) == "0F0:0-1 3F0:23-24 3I0:24-25 3W0:25-26 0I0:48-49 0W0:49-50"
    assert intervals(timeline, 1) == "1F0:11-12 2F0:12-13 2I0:35-36 2W0:36-37 1I0:37-38 1W0:38-39"


def test_an_input_gradient_goes_on_before_its_weight_gradient() -> None:
    whole = simulate(Schedule.parse("0: 0F0 0B0\n1: 1F0 1B0"))
    halves = simulate(Schedule.parse("0: 0F0 0B0\n1: 1F0 1I0 1W0"))
    assert (whole.makespan, halves.makespan) == (6, 5)


def test_messages_go_through_a_link_one_after_another() -> None:
    # Each forward takes 1, each message 3 on the wire and 1 more to arrive.
    costs = Costs(1, 1, 0, latency=1, bandwidth=2, boundary=6)
    timeline = simulate(lower.forward_only(make_schedule("gpipe", devices=2, microbatches=3)), costs)
    assert intervals(timeline, 0) == "0F0:0-1 0F1:1-2 0F2:2-3"
    assert intervals(timeline, 1) == "1F0:5-6 1F1:8-9 1F2:11-12"


def test_the_two_directions_of_a_link_do_not_hold_each_other_up() -> None:
    costs = Costs(1, 1, 0, bandwidth=1, boundary=2)
    timeline = simulate(make_schedule("1f1b", devices=2, microbatches=2), costs)
    assert intervals(timeline, 1) == "1F0:3-4 1B0:4-5 1F1:5-6 1B1:6-7"
    assert intervals(timeline, 0) == "0F0:0-1 0F1:1-2 0B0:7-8 0B1:9-10"


def test_what_crosses_has_the_size_of_the_later_stage_s_input() -> None:
    costs = Costs(1, 1, 0, bandwidth=1, boundary=[100, 7])
    timeline = simulate(make_schedule("gpipe", devices=2, microbatches=1), costs)
    assert intervals(timeline, 1) == "1F0:8-9 1B0:9-10"
    assert intervals(timeline, 0) == "0F0:0-1 0B0:17-18"


@pytest.mark.parametrize("name", NAMED)
@given(K=st.integers(1, 5), M=st.integers(1, 8), f=times, i=times, w=times, latency=times)
def test_written_transfers_with_enough_buffers_change_no_time(
    name: str, K: int, M: int, f: Fraction, i: Fraction, w: Fraction, latency: Fraction
) -> None:
    schedule = make_schedule(name, devices=K, microbatches=max(M, K) if name == "2bw" else M, minibatches=2)
    written = lower.add_transfers(schedule, spare_buffers=schedule.num_stages * schedule.num_microbatches)
    for costs in (Costs(f, i, w, latency=latency), Costs(f, i, w, latency=latency, bandwidth=3, boundary=Fraction(2))):
        assert compute(simulate(written, costs)) == compute(simulate(schedule, costs))


@pytest.mark.parametrize("name", NAMED)
@given(K=st.integers(1, 5), M=st.integers(1, 8), f=times, i=times, w=times)
def test_without_latency_the_buffers_of_the_proof_change_no_time(
    name: str, K: int, M: int, f: Fraction, i: Fraction, w: Fraction
) -> None:
    schedule = make_schedule(name, devices=K, microbatches=max(M, K) if name == "2bw" else M, minibatches=2)
    costs = Costs(f, i, w)
    assert compute(simulate(lower.add_transfers(schedule), costs)) == compute(simulate(schedule, costs))


def test_a_receive_that_is_posted_ahead_is_no_part_of_the_span() -> None:
    """It is posted at once, on every device: zb-v had a span bubble of 5.9% with --transfers, and none without."""
    schedule = make_schedule("zb-v", devices=4, microbatches=8)
    assert simulate(lower.add_transfers(schedule)).span == simulate(schedule).span == 24


def test_a_receive_that_is_posted_late_delays_its_message() -> None:
    prompt = Schedule.parse("0: 0F0 0SEND_F0 0F1 0SEND_F1\n1: 1RECV_F0 1RECV_F1 1F0 1F1")
    late = Schedule.parse("0: 0F0 0SEND_F0 0F1 0SEND_F1\n1: 1RECV_F0 1F0 1RECV_F1 1F1")
    costs = Costs(latency=5)
    assert simulate(prompt, costs).makespan == 8
    assert simulate(late, costs).makespan == 13


def test_a_recompute_waits_for_its_own_forward_alone() -> None:
    timeline = simulate(Schedule.parse("0: 0F0 0R0 0B0\n1: 1F0 1B0"), Costs(1, 1, 1, recompute=2))
    assert intervals(timeline, 0) == "0F0:0-1 0R0:1-3 0B0:4-6"


def test_updates_take_their_time() -> None:
    schedule = lower.add_updates(make_schedule("gpipe", devices=2, microbatches=1))
    assert intervals(simulate(schedule, Costs(update=10)), 1) == "1F0:1-2 1B0:2-4 1U0:4-14"


def test_unequal_stages_are_simulated_as_they_are() -> None:
    timeline = simulate(make_schedule("gpipe", devices=2, microbatches=2), Costs([1, 3], [1, 1], [0, 0]))
    assert intervals(timeline, 1) == "1F0:1-4 1F1:4-7 1B0:7-8 1B1:8-9"


def test_a_schedule_that_hangs_is_an_error_not_a_hang() -> None:
    with pytest.raises(ScheduleError, match="device 0 stands before 0B0 and waits for 0F0"):
        simulate(Schedule.parse("0: 0B0 0F0"))


def test_a_list_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="forward lists 2 stages, but the schedule has 4"):
        simulate(make_schedule("1f1b", devices=4, microbatches=4), Costs(forward=[1, 2]))


@given(K=st.integers(1, 6), M=st.integers(1, 10), f=times, i=times, w=times, factor=times)
def test_time_has_no_unit(K: int, M: int, f: Fraction, i: Fraction, w: Fraction, factor: Fraction) -> None:
    schedule = make_schedule("zb-h1", devices=K, microbatches=M)
    once, scaled = simulate(schedule, Costs(f, i, w)), simulate(schedule, Costs(f * factor, i * factor, w * factor))
    assert scaled.makespan == once.makespan * factor
    assert scaled.bubble == once.bubble
