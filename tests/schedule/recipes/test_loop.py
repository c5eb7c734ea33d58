"""interleaved and looped-bfs: v stages per device make the bubble v times smaller."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from gapless.schedule.costs import Costs
from gapless.schedule.memory import peaks
from gapless.schedule.placement import loop
from gapless.schedule.recipes import make_schedule
from gapless.schedule.simulate import simulate
from gapless.schedule.verify import verify
from tests.schedule.strategies import times


@given(K=st.integers(1, 6), extra=st.integers(0, 12), v=st.integers(1, 4), f=times, i=times, w=times)
def test_the_bubble_shrinks_v_times_as_soon_as_there_is_a_microbatch_per_device(
    K: int, extra: int, v: int, f: Fraction, i: Fraction, w: Fraction
) -> None:
    M = K + extra
    for name in ("interleaved", "looped-bfs"):
        schedule = make_schedule(name, devices=K, microbatches=M, stages_per_device=v)
        assert schedule.placement == loop(K, v)
        found = simulate(schedule, Costs(f, i, w))
        assert found.makespan == found.work + (K - 1) * (f + i + w) / v


@given(K=st.integers(1, 8), rounds=st.integers(1, 4), v=st.integers(1, 4))
def test_interleaved_holds_a_little_more_than_1f1b(K: int, rounds: int, v: int) -> None:
    schedule = make_schedule("interleaved", devices=K, microbatches=K * rounds, stages_per_device=v)
    most = max(peaks(schedule, Costs(activation=Fraction(1))))
    assert most <= K + Fraction(K - 1, v)
    if rounds > 1:
        assert most == K + Fraction(K - 1, v)


def test_a_ragged_number_of_microbatches_does_not_deadlock() -> None:
    # Groups of K with a short last one deadlock for K = 5, M = 7, v = 2.
    assert verify(make_schedule("interleaved", devices=5, microbatches=7, stages_per_device=2)).ok


def test_one_stage_per_device_is_a_line() -> None:
    plain = make_schedule("1f1b", devices=4, microbatches=8)
    looped = make_schedule("interleaved", devices=4, microbatches=8, stages_per_device=1)
    assert looped.placement == plain.placement
    assert looped == make_schedule("eager-1f1b", devices=4, microbatches=8)


def test_two_stages_per_device_unless_said_otherwise() -> None:
    assert make_schedule("looped-bfs", devices=3, microbatches=4).num_stages == 6
