"""zb-h1 and zb-h2: weight gradients fill the gaps."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.schedule.action import Kind
from gapless.schedule.costs import Costs
from gapless.schedule.recipes import make_schedule
from gapless.schedule.simulate import simulate
from tests.schedule.strategies import shares, times


@given(K=st.integers(1, 8), extra=st.integers(0, 12), f=times, i=times, share=shares)
def test_zb_h1_fills_the_bubble_with_two_weight_gradients_per_device(
    K: int, extra: int, f: Fraction, i: Fraction, share: Fraction
) -> None:
    M, w = K + extra, share * min(f, i)
    found = simulate(make_schedule("zb-h1", devices=K, microbatches=M), Costs(f, i, w))
    assert found.makespan == M * (f + i + w) + (K - 1) * (f + i - w)


@given(K=st.integers(1, 8), extra=st.integers(0, 12), f=times, i=times, share=shares, hop=shares)
def test_the_span_of_zb_h2(K: int, extra: int, f: Fraction, i: Fraction, share: Fraction, hop: Fraction) -> None:
    M, w = max(1, 2 * K - 1) + extra, share * min(f, i)
    latency = hop * (f + i) / 2  # a round trip takes no longer than a forward and an input gradient
    found = simulate(make_schedule("zb-h2", devices=K, microbatches=M), Costs(f, i, w, latency=latency))
    assert found.span == M * (f + i + w) + max(Fraction(0), (K - 1) * (f + i + 2 * latency - 2 * w))


@given(K=st.integers(1, 8), extra=st.integers(0, 12), f=times)
def test_at_equal_costs_zb_h2_ends_with_zb_h1(K: int, extra: int, f: Fraction) -> None:
    M = 2 * K + extra
    first = simulate(make_schedule("zb-h1", devices=K, microbatches=M), Costs(f, f, f))
    second = simulate(make_schedule("zb-h2", devices=K, microbatches=M), Costs(f, f, f))
    assert first.makespan == second.makespan
    assert second.span == second.work


@pytest.mark.parametrize(("name", "most"), [("zb-h1", 5), ("zb-h2", 9)])
def test_every_device_holds_the_same(name: str, most: int) -> None:
    timeline = simulate(make_schedule(name, devices=5, microbatches=20))
    assert timeline.peak == (most,) * 5


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
def test_input_and_weight_gradients_stay_apart(name: str) -> None:
    kinds = make_schedule(name, devices=3, microbatches=4).kinds
    assert kinds == {Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD}
