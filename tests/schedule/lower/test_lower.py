"""Each pass: what it changes, what it leaves, and what that is worth by the simulator."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.schedule import lower
from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.dependencies import completes
from gapless.schedule.recipes import RECIPES, make_schedule
from gapless.schedule.routes import messages
from gapless.schedule.simulate import simulate
from gapless.schedule.verify import verify
from tests.schedule.strategies import times

NAMED = sorted(name for name in RECIPES if name not in ("auto", "optimal"))
sizes = {"K": st.integers(1, 5), "M": st.integers(1, 8)}


def made(name: str, K: int, M: int) -> Schedule:
    return make_schedule(name, devices=K, microbatches=max(M, K) if name == "2bw" else M, minibatches=2)


def halves(schedule: Schedule) -> list[list[Action]]:
    """Each row with every B written as its I and its W."""
    return [[gift for action in row for gift in completes(action)] for row in schedule.rows]


def blindly_fused(schedule: Schedule) -> Schedule:
    rows = []
    for row in schedule.rows:
        fused: list[Action] = []
        for action in row:
            stage, kind, microbatch = action
            if kind is Kind.WEIGHT_GRAD and fused[-1] == Action(stage, Kind.INPUT_GRAD, microbatch):
                fused[-1] = Action(stage, Kind.BACKWARD, microbatch)
            else:
                fused.append(action)
        rows.append(fused)
    return schedule.with_rows(rows)


# -- fuse and split ---------------------------------------------------------------------------------------------------


def test_fusing_leaves_zb_v_as_quick_as_it_was_and_fusing_blindly_does_not() -> None:
    schedule = make_schedule("zb-v", devices=4, microbatches=8)
    fused = lower.fuse(schedule)
    assert Kind.BACKWARD in fused.kinds
    assert simulate(fused).makespan == simulate(schedule).makespan == 25.5
    assert simulate(blindly_fused(schedule)).makespan == 28.5


@pytest.mark.parametrize("name", NAMED)
@given(**sizes, f=times, i=times, w=times, latency=times)
def test_fusing_moves_no_action_and_costs_no_time(
    name: str, K: int, M: int, f: Fraction, i: Fraction, w: Fraction, latency: Fraction
) -> None:
    schedule, costs = made(name, K, M), Costs(f, i, w, latency=latency)
    fused = lower.fuse(schedule, costs)
    assert halves(fused) == halves(schedule)
    before, after = simulate(schedule, costs), simulate(fused, costs)
    assert (after.makespan, after.span, after.peak) == (before.makespan, before.span, before.peak)


def test_splitting_takes_1f1b_from_69_to_62_in_the_same_memory() -> None:
    schedule = make_schedule("1f1b", devices=8, microbatches=16)
    split = lower.split(schedule)
    assert (simulate(schedule).makespan, simulate(split).makespan) == (69, 62)
    assert simulate(split).peak == simulate(schedule).peak
    assert halves(split) == halves(schedule)


@pytest.mark.parametrize("name", NAMED)
@given(**sizes, f=times, i=times, w=times)
def test_splitting_never_loses(name: str, K: int, M: int, f: Fraction, i: Fraction, w: Fraction) -> None:
    schedule, costs = made(name, K, M), Costs(f, i, w)
    split = lower.split(schedule, costs)
    assert verify(split).ok
    assert simulate(split, costs).makespan <= simulate(schedule, costs).makespan
    assert simulate(split, costs).peak == simulate(schedule, costs).peak


def test_a_split_that_gains_nothing_is_not_made() -> None:
    schedule = make_schedule("gpipe", devices=1, microbatches=4)
    assert lower.split(schedule) == schedule


# -- recompute --------------------------------------------------------------------------------------------------------


@given(K=st.integers(1, 8), M=st.integers(2, 16), f=times, i=times, w=times, r=times)
def test_an_early_recompute_hides_behind_the_arriving_gradients(
    K: int, M: int, f: Fraction, i: Fraction, w: Fraction, r: Fraction
) -> None:
    costs = Costs(f, i, w, recompute=r)
    schedule = make_schedule("gpipe", devices=K, microbatches=M)
    early = simulate(lower.add_recompute(schedule, costs), costs)
    assert early.makespan == (M + K - 1) * (f + i + w) + M * r
    late = lower.add_recompute(schedule, costs, early=False)
    late_costs = costs.recomputed_late(schedule.placement)
    assert simulate(late, late_costs).makespan == (M + K - 1) * (f + i + w + r)


def test_where_a_backward_follows_its_forward_nothing_is_recomputed() -> None:
    assert lower.add_recompute(make_schedule("1f1b", devices=2, microbatches=2)).text() == (
        "0: 0F0 0F1 0R0 0B0 0R1 0B1\n1: 1F0 1B0 1F1 1B1"
    )


def test_a_recompute_moves_ahead_into_idle_time_where_memory_allows() -> None:
    schedule, costs = make_schedule("gpipe", devices=4, microbatches=4), Costs(recompute=1)
    tight = lower.add_recompute(schedule, costs, memory_limit=1)
    roomy = lower.add_recompute(schedule, costs, memory_limit=4)
    assert max(simulate(tight, costs).peak) == 1
    assert 1 < max(simulate(roomy, costs).peak) <= 4
    assert simulate(roomy, costs).makespan <= simulate(tight, costs).makespan


def test_recomputing_holds_inputs_and_one_activation() -> None:
    schedule = make_schedule("gpipe", devices=3, microbatches=8)
    costs = Costs(recompute=1, activation=100, boundary=1)
    assert max(simulate(lower.add_recompute(schedule, costs), costs).peak) == 108


@pytest.mark.parametrize("name", NAMED)
@given(**sizes, r=times, early=st.booleans())
def test_a_schedule_with_recomputes_verifies(name: str, K: int, M: int, r: Fraction, early: bool) -> None:
    schedule, costs = made(name, K, M), Costs(recompute=r)
    report = verify(lower.add_recompute(schedule, costs, early=early))
    assert report.ok
    assert report.in_order


def test_only_the_stages_asked_for_are_recomputed() -> None:
    schedule = lower.add_recompute(make_schedule("gpipe", devices=3, microbatches=2), stages=[1])
    assert {stage for stage, _ in schedule.recomputed} == {1}


# -- the others -------------------------------------------------------------------------------------------------------


def test_forward_only_keeps_the_forwards_in_their_order() -> None:
    assert (
        lower.forward_only(make_schedule("1f1b", devices=2, microbatches=3)).text() == "0: 0F0 0F1 0F2\n1: 1F0 1F1 1F2"
    )


def test_an_update_comes_right_after_the_last_weight_gradient_of_its_stage() -> None:
    assert lower.add_updates(make_schedule("zb-h1", devices=2, microbatches=1)).text() == (
        "0: 0F0 0I0 0W0 0U0\n1: 1F0 1I0 1W0 1U0"
    )
    vee = lower.add_updates(make_schedule("zb-v", devices=1, microbatches=2))
    assert vee.text() == "0: 0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 1U0 0I1 0W1 0U0"


def test_transfers_are_written_behind_their_producers_and_receives_ahead() -> None:
    assert lower.add_transfers(make_schedule("1f1b", devices=2, microbatches=3)).text() == (
        "0: 0RECV_B0 0RECV_B1 0F0 0SEND_F0 0F1 0SEND_F1 0B0 0RECV_B2 0F2 0SEND_F2 0B1 0B2\n"
        "1: 1RECV_F0 1RECV_F1 1F0 1RECV_F2 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1F2 1B2 1SEND_B2"
    )


def test_stages_on_the_same_device_send_nothing() -> None:
    assert not lower.add_transfers(make_schedule("zb-v", devices=1, microbatches=3)).has_transfers


@pytest.mark.parametrize("name", NAMED)
@given(**sizes)
def test_a_schedule_with_transfers_verifies_and_round_trips(name: str, K: int, M: int) -> None:
    schedule = lower.add_transfers(made(name, K, M))
    assert verify(schedule).ok
    assert Schedule.parse(schedule.text()) == schedule


@given(order=st.permutations(range(8)), spare=st.integers(0, 2))
def test_receives_are_posted_in_the_order_of_the_sends_and_never_beyond_the_pool(order: list[int], spare: int) -> None:
    # Consumed as 1 0 3 2 5 4, receives once were posted in that order too, which a channel does not know.
    forwards = " ".join(f"0F{m}" for m in range(8))
    schedule = Schedule.parse(f"0: {forwards}\n1: " + " ".join(f"1F{m}" for m in order))
    pool = verify(schedule).buffers[0, 1, "activation"] + spare
    written = lower.add_transfers(schedule, spare_buffers=spare)
    assert verify(written).ok
    posted = [action.microbatch for action in written.rows[1] if action.kind is Kind.RECEIVE_ACTIVATION]
    assert posted == list(range(8))
    outstanding = 0
    for action in written.rows[1]:
        outstanding += 1 if action.kind is Kind.RECEIVE_ACTIVATION else -1
        assert 0 <= outstanding <= pool


def test_messages_are_numbered_as_they_are_produced() -> None:
    produced, consumed = messages(make_schedule("1f1b", devices=2, microbatches=2))
    assert produced == {(0, 1, "activation"): {(0, 0): 0, (0, 1): 1}, (1, 0, "gradient"): {(1, 0): 0, (1, 1): 1}}
    assert [str(action) for _, action in consumed[1, 0, "gradient"]] == ["0B0", "0B1"]


@pytest.mark.parametrize("name", ["pipedream", "zb-v", "1f1b"])
def test_a_pass_that_was_made_is_not_made_again(name: str) -> None:
    # `show pipedream --updates` once had 0U0 twice.
    schedule = make_schedule(name, devices=3, microbatches=4)
    for one in (lower.add_updates, lower.add_transfers, lower.add_recompute, lower.fuse, lower.forward_only):
        once = one(schedule)
        assert one(once) == once
        assert verify(once).ok
