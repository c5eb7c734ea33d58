"""pipedream and 2bw: the pipeline never drains, and weights are older than the gradients that change them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.errors import ScheduleError
from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.placement import replicated
from gapless.schedule.recipes import make_schedule
from gapless.schedule.simulate import simulate
from gapless.schedule.verify import verify

replica_counts = st.lists(st.integers(1, 4), min_size=1, max_size=5)


def most_versions_in_use(row: tuple[Action, ...], per_minibatch: int) -> int:
    """How many versions of its weights a device needs at once: the current one and those of forwards under way.

    PipeDream stashes: a B uses the version its F saw. 2bw reads only the last two: an F always sees the current one.
    """
    version, under_way, most = 0, {}, 1
    for action in row:
        if action.kind is Kind.FORWARD:
            under_way[action.microbatch] = version
        elif action.kind is Kind.BACKWARD:
            del under_way[action.microbatch]
        elif action.kind is Kind.UPDATE:
            version += 1
        most = max(most, len({version, *under_way.values()}))
    return most


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


@pytest.mark.parametrize(("K", "M"), [(1, 1), (2, 2), (3, 4), (4, 4), (4, 7)])
def test_2bw_and_pipedream_are_what_their_definition_says(K: int, M: int) -> None:
    for count in range(1, 3 * K + 2):
        two = make_schedule("2bw", devices=K, microbatches=M, minibatches=count)
        assert [list(row) for row in two.rows] == by_hand(K, M, count)
        one = make_schedule("pipedream", devices=K, microbatches=count)
        assert [list(row) for row in one.rows] == by_hand(K, 1, count)


@given(replicas=replica_counts, M=st.integers(1, 30))
def test_pipedream_with_replicated_stages_verifies_and_round_trips(replicas: list[int], M: int) -> None:
    schedule = make_schedule("pipedream", devices=sum(replicas), microbatches=M, replicas=replicas)
    assert verify(schedule, M, len(replicas)).ok
    assert schedule.placement == replicated(replicas).within(M)
    assert Schedule.parse(schedule.text()) == Schedule.parse(schedule.csv()) == schedule


@given(replicas=replica_counts)
def test_pipedream_warms_up_as_the_replicas_after_a_stage_say(replicas: list[int]) -> None:
    R = sum(replicas)
    schedule = make_schedule("pipedream", devices=R, microbatches=4 * R * max(replicas), replicas=replicas)
    device = 0
    for stage, count in enumerate(replicas):
        warm_up = (R - 1 - sum(replicas[:stage])) // count
        for row in schedule.rows[device : device + count]:
            first_backward = next(i for i, action in enumerate(row) if action.kind is Kind.BACKWARD)
            assert first_backward == warm_up + 1  # the warm-up, and the F of the first [F B U]
        device += count


@given(replicas=replica_counts)
def test_the_input_stage_has_noam_minibatches_in_flight(replicas: list[int]) -> None:
    R = sum(replicas)
    schedule = make_schedule("pipedream", devices=R, microbatches=4 * R * max(replicas), replicas=replicas)
    noam = -(-R // replicas[0])
    assert simulate(schedule).peak[: replicas[0]] == (noam,) * replicas[0]


def test_a_replica_takes_every_other_microbatch_and_updates_after_each_backward() -> None:
    assert make_schedule("pipedream", devices=3, microbatches=4, replicas=[2, 1]).text() == (
        "0: 0F0 0F2 0B0 0U0 0B2 0U2\n1: 0F1 0F3 0B1 0U1 0B3 0U3\n2: 1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2 1F3 1B3 1U3"
    )


@given(K=st.integers(1, 10), M=st.integers(1, 30))
def test_pipedream_updates_right_after_every_backward(K: int, M: int) -> None:
    for row in make_schedule("pipedream", devices=K, microbatches=M).rows:
        for i, (stage, kind, m) in enumerate(row):
            if kind is Kind.BACKWARD:
                assert row[i + 1] == Action(stage, Kind.UPDATE, m)


@given(K=st.integers(1, 8))
def test_pipedream_keeps_a_version_per_minibatch_in_flight(K: int) -> None:
    rows = make_schedule("pipedream", devices=K, microbatches=4 * K).rows
    assert [most_versions_in_use(row, 1) for row in rows] == [K - r for r in range(K)]


@given(K=st.integers(1, 8), extra=st.integers(0, 8), minibatches=st.integers(1, 5))
def test_2bw_needs_two_versions_of_the_weights_and_never_a_third(K: int, extra: int, minibatches: int) -> None:
    schedule = make_schedule("2bw", devices=K, microbatches=K + extra, minibatches=minibatches)
    assert verify(schedule, (K + extra) * minibatches, K).ok
    assert all(most_versions_in_use(row, K + extra) <= 2 for row in schedule.rows)


def test_2bw_refuses_fewer_microbatches_than_devices_with_the_numbers() -> None:
    with pytest.raises(ScheduleError) as caught:
        make_schedule("2bw", devices=4, microbatches=3)
    assert "M = 3 < K = 4" in str(caught.value)


@pytest.mark.parametrize("replicas", [[1, 1], [2, 3], [0, 4], [], [-1, 5]])
def test_replicas_must_add_up_to_the_devices(replicas: list[int]) -> None:
    with pytest.raises(ScheduleError, match=r"devices, but there are 4: give one number of at least 1 per stage"):
        make_schedule("pipedream", devices=4, microbatches=4, replicas=replicas)


@pytest.mark.parametrize(("name", "pace"), [("pipedream", 3), ("2bw", 24)])
def test_there_is_no_bubble_in_steady_state(name: str, pace: int) -> None:
    schedule = make_schedule(name, devices=4, microbatches=8 if name == "2bw" else 32)
    assert simulate(schedule).period == pace
