"""zb-v, v-half, v-min and dualpipe-v: down the devices and back up."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.schedule.costs import Costs
from gapless.schedule.placement import vee
from gapless.schedule.recipes import make_schedule
from gapless.schedule.simulate import simulate
from tests.schedule.strategies import times


@given(K=st.integers(1, 8), extra=st.integers(0, 10), f=times)
def test_zb_v_has_no_span_bubble_at_equal_costs(K: int, extra: int, f: Fraction) -> None:
    M = 2 * K - 1 + extra
    found = simulate(make_schedule("zb-v", devices=K, microbatches=M), Costs(f, f, f))
    assert found.span == found.work
    assert found.makespan == found.work + (K - 1) * f / 2
    assert found.peak == (K,) * K


@given(K=st.integers(1, 8), extra=st.integers(0, 10), f=times)
def test_dualpipe_v_run_serially_ends_with_zb_v(K: int, extra: int, f: Fraction) -> None:
    M = 2 * K + extra
    found = simulate(make_schedule("dualpipe-v", devices=K, microbatches=M), Costs(f, f, f))
    assert found.makespan == simulate(make_schedule("zb-v", devices=K, microbatches=M), Costs(f, f, f)).makespan


@pytest.mark.parametrize("K", range(2, 13))
def test_less_memory_costs_some_bubble(K: int) -> None:
    """1f1b's bubble is 3(K-1) at unit costs; v-half takes about half of it and v-min about two thirds."""
    bubbles = {}
    for name in ("1f1b", "v-min", "v-half", "zb-v"):
        timeline = simulate(make_schedule(name, devices=K, microbatches=4 * K))
        bubbles[name] = timeline.makespan - timeline.work
    assert bubbles["zb-v"] <= bubbles["v-half"] <= bubbles["v-min"] < bubbles["1f1b"]
    assert bubbles["v-half"] <= bubbles["1f1b"] * 0.5 + 1
    assert bubbles["v-min"] <= bubbles["1f1b"] * 2 / 3 + 1


@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min", "dualpipe-v"])
def test_a_single_device_holds_both_stages(name: str) -> None:
    schedule = make_schedule(name, devices=1, microbatches=3)
    assert schedule.placement == vee(1)
    assert simulate(schedule).bubble == 0


def test_a_microbatch_too_few_is_dropped_not_refused() -> None:
    assert make_schedule("zb-v", devices=3, microbatches=1).text() == (
        "0: 0F0 5F0 5I0 5W0 0I0 0W0\n1: 1F0 4F0 4I0 4W0 1I0 1W0\n2: 2F0 3F0 3I0 3W0 2I0 2W0"
    )
