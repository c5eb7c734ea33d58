"""Every kind of violation with its place and its words, all of them at once; and the proof that nothing hangs, checked
against a brute-force run with finite buffers."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.errors import ScheduleError
from gapless.schedule import lower
from gapless.schedule.action import Action, Schedule
from gapless.schedule.dependencies import completes, dependencies
from gapless.schedule.recipes import RECIPES, make_schedule
from gapless.schedule.routes import Channel, Routes, messages
from gapless.schedule.verify import verify
from gapless.schedule.violation import Violation, excerpt

NAMED = sorted(name for name in RECIPES if name not in ("auto", "optimal"))


def found(drawing: str) -> list[str]:
    """The violations of a drawn schedule as `device.position rule: message`."""
    return [f"{v.device}.{v.position} {v.rule}: {v.message}" for v in verify(Schedule.parse(drawing)).violations]


@pytest.mark.parametrize(
    ("drawing", "violations"),
    [
        ("0: 0F0 0F1 0B0", ["0.3 complete: 0B1 is missing"]),
        ("0: 0F0 0I0 0F1 0B1", ["0.4 complete: 0W0 is missing"]),
        ("0: 0F0 0B0 0F1 0B1\n1: 1F1 1B1", ["0.1 dependency: 0B0 waits for 1I0, which is missing"]),
        ("0: 0F0 0F0 0B0", ["0.1 complete: 0F0 occurs twice on device 0"]),
        (
            "0: 0F0 0B0 0I0 0W0",
            ["0.4 complete: 0B0 is the whole backward, without I or W beside it (zero bubble's B is I here)"],
        ),
        ("0: 0B0 0F0", ["0.0 dependency: 0B0 waits for 0F0, which comes later on the same device"]),
        ("0: 0F0 0W0 0I0", ["0.1 dependency: 0W0 waits for 0I0, which comes later on the same device"]),
        ("0: 0F0 0U0 0B0", ["0.1 dependency: 0U0 waits for 0W0, which comes later on the same device"]),
        ("0: 0R0 0F0 0B0", ["0.0 dependency: 0R0 waits for 0F0, which comes later on the same device"]),
        ("0: 0F0 0B0 0R0", ["0.1 dependency: 0B0 waits for 0R0, which comes later on the same device"]),
        (
            "0: 0F0\n1: 0B0",
            ["1.0 placement: 0B0 is on device 1, but stage 0 has microbatch 0 on device 0"],
        ),
        (
            "0: 0F0 0B0 1U0\n1: 1F0 1B0",
            ["0.2 placement: 1U0 is on device 0, which does not hold stage 1", "0.3 complete: 0U0 is missing"],
        ),
        ("0: 0F0 0B0 0U0\n1: 1F0 1B0", ["1.2 complete: 1U0 is missing"]),
        (
            "0: 0F0 0B0 0F1 0B1 0U0 0F2 0B2 0U1",
            [
                (
                    "0.4 complete: 3 microbatches can't be shared by updates 0 to 1: "
                    "each minibatch has as many as the others"
                )
            ],
        ),
        (
            "0: 0F0 0SEND_F0 0RECV_B0 0B0\n1: 1RECV_F0 1F0 1B0",
            ["1.3 complete: 1SEND_B0 is missing: the gradient crosses from device 1 to device 0"],
        ),
        (
            "0: 0F0 0SEND_F0 0B0\n1: 1RECV_F0 1F0 1B0 1SEND_B0",
            ["0.3 complete: 0RECV_B0 is missing: the gradient crosses from device 1 to device 0"],
        ),
        (
            "0: 0F0 0SEND_F0 0F1 0SEND_F1\n1: 1RECV_F1 1RECV_F0 1F0 1F1",
            ["1.0 order: 1RECV_F1 comes before 1RECV_F0, which device 0 sends first"],
        ),
        # Each of these three was accepted: the first two hang, and the third runs as if it trained.
        (
            "0: 0F0 0SEND_F0 0RECV_B0\n1: 1RECV_F0 1F0",
            ["0.2 complete: 0RECV_B0 transfers something that does not cross between devices"],
        ),
        (
            "0: 0F0 0SEND_F0\n1: 1RECV_F0 1F0 1SEND_F0",
            ["1.2 complete: 1SEND_F0 transfers something that does not cross between devices"],
        ),
        ("0: 0F0 0R0", ["0.1 complete: 0R0 is for no backward: the schedule has none"]),
        (
            "0: 0SEND_F0 0F0\n1: 1RECV_F0 1F0",
            [
                "0.0 dependency: 0SEND_F0 waits for 0F0, which comes later on the same device",
                "1.1 dependency: 1F0 waits for 0F0 on device 0, which itself waits before 0SEND_F0",
            ],
        ),
    ],
)
def test_each_kind_of_violation_is_found_at_its_place(drawing: str, violations: list[str]) -> None:
    assert set(violations) <= set(found(drawing))


def test_all_violations_are_reported_at_once() -> None:
    # A missing action, one that is there twice, one on the wrong device, and two in the wrong order.
    assert found("0: 0F0 0F1 0F1 0B0 0B1 0W2\n1: 1B0 1F0 1B1 1F1 0F2 0I2") == [
        "0.2 complete: 0F1 occurs twice on device 0",
        "0.3 dependency: 0B0 waits for 1I0 on device 1, which itself waits before 1B0",
        "1.0 dependency: 1B0 waits for 1F0, which comes later on the same device",
        "1.2 order: 1B1 comes before 1F1, which it needs, on the same device",
        "1.4 placement: 0F2 is on device 1, but stage 0 has microbatch 2 on device 0",
        "1.5 placement: 0I2 is on device 1, but stage 0 has microbatch 2 on device 0",
        "1.6 complete: 1F2 is missing",
        "1.6 complete: 1B2 is missing",
    ]


def test_a_schedule_of_forwards_alone_is_for_inference() -> None:
    assert verify(lower.forward_only(make_schedule("zb-v", devices=3, microbatches=4))).ok


def test_the_expected_sizes_are_checked_where_they_are_known() -> None:
    schedule = make_schedule("1f1b", devices=2, microbatches=2)
    assert verify(schedule, num_microbatches=2, num_stages=2).ok
    missing = [violation.message for violation in verify(schedule, num_microbatches=3).violations]
    assert missing == ["0F2 is missing", "0B2 is missing", "1F2 is missing", "1B2 is missing"]
    assert len(verify(schedule, num_stages=3).violations) == 4


def test_gradients_out_of_microbatch_order_are_a_warning() -> None:
    report = verify(Schedule.parse("0: 0F0 0F1 0I0 0I1 0W1 0W0"))
    assert report.ok
    (warning,) = report.warnings
    assert warning.message == (
        "0W0 comes after microbatch 1: stage 0 takes weight gradients out of microbatch order, "
        "so gradients wait for their turn, in extra memory"
    )


def test_a_violation_is_shown_in_its_row() -> None:
    schedule = Schedule.parse("0: 0F0 0F1 0F2 0F3 0F4 0F5 0B0 0B1 0B2 0B3 0B4 0B5")
    assert excerpt(schedule, Violation("order", 0, 6, "")) == (
        "    0: ... 0F2 0F3 0F4 0F5 0B0 0B1 0B2 0B3 0B4 ...\n                           ^^^"
    )
    assert excerpt(schedule, Violation("complete", 0, 12, "")) == (
        "    0: ... 0B2 0B3 0B4 0B5 ?\n                           ^"
    )


def test_raising_shows_the_first_violations_and_counts_the_others() -> None:
    schedule = Schedule.parse("0: 0F0 0F1 0F2 0F3 0B0", name="mine")
    with pytest.raises(ScheduleError) as caught:
        verify(Schedule.parse("0: 0F0 0F1 0F2 0F3 0F4 0B0")).raise_if_wrong()
    assert str(caught.value).startswith("schedule given has 4 violations:\n  0B1 is missing\n    0: ")
    assert str(caught.value).endswith("and 1 more")
    with pytest.raises(ScheduleError, match=r"schedule mine has 3 violations:"):
        verify(schedule).raise_if_wrong()


# -- the deadlock proof -----------------------------------------------------------------------------------------------


def runs_to_its_end(schedule: Schedule, pools: dict[Channel, int]) -> bool:
    """Run with finite receive buffers: receive n is posted once message n-p was consumed, and a channel delivers in
    order, so that message n arrives only once all messages up to n-p were consumed.

    Written without the proof: it looks at every device again and again until none can go on.
    """
    produced, consumed = messages(schedule)
    takes: dict[Action, list[tuple[Channel, int]]] = defaultdict(list)
    for channel, consumers in consumed.items():
        for message, action in consumers:
            takes[action].append((channel, produced[channel][message]))
    there: set[Action] = set()
    taken: set[tuple[Channel, int]] = set()
    position = [0] * schedule.num_devices
    going = True
    while going:
        going = False
        for device, row in enumerate(schedule.rows):
            if position[device] == len(row):
                continue
            action = row[position[device]]
            buffered = all(
                (channel, earlier) in taken for channel, n in takes[action] for earlier in range(n - pools[channel] + 1)
            )
            if buffered and there.issuperset(dependencies(action, schedule)):
                there.update(completes(action))
                taken.update(takes[action])
                position[device] += 1
                going = True
    return all(position[device] == len(row) for device, row in enumerate(schedule.rows))


@pytest.mark.parametrize("name", NAMED)
@given(K=st.integers(1, 6), M=st.integers(1, 9), v=st.integers(1, 4))
def test_the_buffers_of_the_proof_are_enough_and_one_less_hangs(name: str, K: int, M: int, v: int) -> None:
    schedule = make_schedule(
        name,
        devices=K,
        microbatches=max(M, K) if name == "2bw" else M,
        stages_per_device=v if RECIPES[name].stages_per_device is None else None,
        minibatches=2,
    )
    pools = verify(schedule).buffers
    assert runs_to_its_end(schedule, pools)
    for channel, pool in pools.items():
        if pool > 1:
            assert not runs_to_its_end(schedule, pools | {channel: pool - 1})


@given(order=st.permutations(range(5)), second=st.permutations(range(5)))
def test_the_proof_holds_for_forwards_consumed_in_any_order(order: list[int], second: list[int]) -> None:
    rows = [[f"0F{m}" for m in order], [f"1F{m}" for m in second]]
    schedule = Schedule.parse("\n".join(f"{device}: {' '.join(row)}" for device, row in enumerate(rows)))
    report = verify(schedule)
    assert report.ok
    channel = (0, 1, "activation")
    least = next(p for p in range(1, 6) if runs_to_its_end(schedule, {channel: p}))
    assert report.buffers == {channel: least}
    assert report.unsent == unsent_in_any_run(schedule, report.buffers)


@pytest.mark.parametrize("name", NAMED)
def test_every_recipe_consumes_in_order_and_needs_one_buffer_per_channel(name: str) -> None:
    assert set(verify(make_schedule(name, devices=4, microbatches=8)).buffers.values()) == {1}


# -- what waits for a receive -----------------------------------------------------------------------------------------


def unsent_in_any_run(schedule: Schedule, pools: dict[Channel, int]) -> dict[Channel, int]:
    """The most messages without a receive, over every state that the devices can reach: by walking through them all."""
    produced, consumed = messages(schedule)
    routes = Routes(schedule.placement)
    most = dict.fromkeys(pools, 0)
    first = (0,) * schedule.num_devices
    waiting, seen = [first], {first}
    while waiting:
        state = waiting.pop()
        ran = {action for row, count in zip(schedule.rows, state, strict=True) for action in row[:count]}
        there = {gift for action in ran for gift in completes(action)}
        for channel, pool in pools.items():
            made = sum((r := routes.leaving(action)) is not None and r.channel == channel for action in ran)
            taken = {produced[channel][message] for message, action in consumed[channel] if action in ran}
            posted = pool + next(n for n in range(len(taken) + 1) if n not in taken)
            most[channel] = max(most[channel], made - posted)
        for device, row in enumerate(schedule.rows):
            if state[device] < len(row) and there.issuperset(dependencies(row[state[device]], schedule)):
                after = (*state[:device], state[device] + 1, *state[device + 1 :])
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)
    return most


@pytest.mark.in_pairs
@pytest.mark.parametrize("inference", [False, True], ids=["training", "forward only"])
@pytest.mark.parametrize(("K", "M"), [(1, 2), (2, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("name", NAMED)
def test_no_run_has_more_messages_unsent_than_reported_and_one_has_as_many(
    name: str, K: int, M: int, inference: bool
) -> None:
    schedule = make_schedule(
        name, devices=K, microbatches=max(M, K) if name == "2bw" else M, minibatches=1 if name == "2bw" else 8
    )
    report = verify(lower.forward_only(schedule) if inference else schedule)
    assert report.unsent == unsent_in_any_run(report.schedule, report.buffers)


def test_between_stages_of_one_device_there_is_no_channel() -> None:
    report = verify(make_schedule("zb-v", devices=2, microbatches=4))
    assert (
        set(report.buffers)
        == set(report.unsent)
        == {(0, 1, "activation"), (1, 0, "activation"), (0, 1, "gradient"), (1, 0, "gradient")}
    )
    assert verify(make_schedule("zb-v", devices=1, microbatches=4)).unsent == {}


def test_gpipe_may_have_all_but_one_message_unsent_and_1f1b_only_as_many_as_there_are_devices_behind() -> None:
    gpipe, ahead = (verify(make_schedule(name, devices=4, microbatches=16)).unsent for name in ("gpipe", "1f1b"))
    assert gpipe[0, 1, "activation"] == 15
    assert ahead[0, 1, "activation"] == 3


def test_a_few_actions_with_large_numbers_are_refused_at_once() -> None:
    schedule = Schedule.parse("0: " + " ".join(f"{n}F{n}" for n in range(2_000)))
    with pytest.raises(ScheduleError, match=r"2,000 actions for 2,000 stages and 2,000 microbatches"):
        verify(schedule)
