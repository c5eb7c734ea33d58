"""A block repeated every six slots: its memory holds whatever the costs are."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.schedule.costs import Costs
from gapless.schedule.memory import peaks
from gapless.schedule.recipes import make_schedule
from gapless.schedule.simulate import simulate
from gapless.schedule.verify import verify
from tests.schedule.strategies import times


@pytest.mark.parametrize(("name", "most"), [("v-half", lambda K: (K + 2) // 2), ("v-min", lambda K: (K + 4) // 3)])
@given(data=st.data(), K=st.integers(1, 8), M=st.integers(1, 16))
def test_unequal_costs_and_latency_never_raise_the_peak(
    name: str, most: object, data: st.DataObject, K: int, M: int
) -> None:
    assert callable(most)
    f, i, w = (data.draw(times) for _ in range(3))
    costs = Costs(f, i, w, latency=data.draw(times), activation=Fraction(1))
    schedule = make_schedule(name, devices=K, microbatches=M, costs=costs)
    report = verify(schedule, M, 2 * K)
    assert report.ok
    assert report.in_order
    assert max(peaks(schedule, costs)) <= most(K)


@pytest.mark.parametrize("name", ["v-half", "v-min"])
def test_weight_gradients_go_where_the_real_costs_leave_room(name: str) -> None:
    plain = make_schedule(name, devices=4, microbatches=8)
    costs = Costs(1, 1, 0.25)
    fitted = make_schedule(name, devices=4, microbatches=8, costs=costs)
    assert fitted != plain
    assert simulate(fitted, costs).makespan <= simulate(plain, costs).makespan


@pytest.mark.parametrize(("name", "makespan", "without"), [("v-half", 31, 33), ("v-min", 38.5, 39.5)])
def test_weight_gradients_wait_for_what_goes_through_a_link_as_for_its_latency(
    name: str, makespan: float, without: float
) -> None:
    # The bandwidth was ignored: W were laid into time that was not idle, and the step got longer.
    slow = Costs(bandwidth=Fraction(4), boundary=Fraction(1))
    fitted = make_schedule(name, devices=4, microbatches=8, costs=slow)
    assert fitted == make_schedule(name, devices=4, microbatches=8, costs=Costs(latency=Fraction(1, 4)))
    assert simulate(fitted, slow).makespan == makespan
    assert simulate(make_schedule(name, devices=4, microbatches=8), slow).makespan == without
