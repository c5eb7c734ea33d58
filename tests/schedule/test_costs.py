"""A single number is per device, a list is per stage, and what makes no sense is refused with its value."""

import math
from fractions import Fraction
from typing import Any

import pytest

from gapless.errors import ConfigError
from gapless.schedule.action import Kind
from gapless.schedule.costs import Costs
from gapless.schedule.placement import line, loop, vee


def test_a_single_number_is_shared_by_the_stages_of_a_device() -> None:
    costs = Costs(forward=Fraction(3))
    assert costs.per_stage("forward", line(2)) == (3, 3)
    assert costs.per_stage("forward", vee(2)) == (Fraction(3, 2),) * 4
    assert costs.per_stage("forward", loop(2, 3)) == (1,) * 6


def test_a_list_gives_one_number_per_stage() -> None:
    assert Costs(forward=[1, 2, 3, 4]).per_stage("forward", vee(2)) == (1, 2, 3, 4)
    with pytest.raises(ConfigError, match=r"^forward lists 3 stages, but the schedule has 4$"):
        Costs(forward=[1, 2, 3]).per_stage("forward", vee(2))


def test_all_of_an_activation_is_kept_for_the_weight_gradient_unless_said_otherwise() -> None:
    assert Costs(activation=5).per_stage("kept_for_weight_grad", line(2)) == (5, 5)
    assert Costs(activation=5, kept_for_weight_grad=2).per_stage("kept_for_weight_grad", line(2)) == (2, 2)


def test_a_whole_backward_takes_as_long_as_its_two_halves() -> None:
    durations = Costs(1, [2, 3], [4, 5], recompute=6, update=7).durations(line(2))
    assert durations[Kind.BACKWARD] == (6, 8)
    assert durations[Kind.RECOMPUTE] == (6, 6)
    assert durations[Kind.UPDATE] == (7, 7)
    assert durations[Kind.SEND_ACTIVATION] == (0, 0)


@pytest.mark.parametrize(
    "name", ["forward", "input_grad", "weight_grad", "recompute", "update", "latency", "activation"]
)
@pytest.mark.parametrize("value", [-1, -0.5, math.nan, math.inf, "1", True, 10**400])
def test_what_is_no_cost_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} is .*, but a cost is a number from 0 to 1e\+100$"):
        Costs(**{name: value})


def test_one_wrong_number_in_a_list_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^weight_grad is nan, but a cost is a number from 0 to 1e\+100$"):
        Costs(weight_grad=[1, math.nan])


def test_a_latency_is_one_number() -> None:
    listed: Any = [1, 2]
    with pytest.raises(ConfigError, match=r"^latency takes one number, not a list of 2$"):
        Costs(latency=listed)


@pytest.mark.parametrize("bandwidth", [0, 1e-300])
def test_a_link_must_carry_something(bandwidth: float) -> None:
    with pytest.raises(ConfigError, match="so nothing would ever arrive; leave it out for links without a limit"):
        Costs(bandwidth=bandwidth)


def test_costs_are_values() -> None:
    assert Costs(forward=[1, 2]) == Costs(forward=(1, 2))
    assert hash(Costs(forward=[1, 2])) == hash(Costs(forward=(1, 2)))


def test_what_crosses_a_boundary_is_not_shared_among_the_stages_of_a_device() -> None:
    """It was, so that an interleaved schedule seemed to send half of what it sends."""
    assert Costs(boundary=6).per_stage("boundary", vee(2)) == (6, 6, 6, 6)
    assert Costs(boundary=[1, 2, 3, 4]).merged(2).boundary == (1, 3)


def test_stages_merge_into_fewer() -> None:
    assert Costs(forward=[1, 2, 3, 4], latency=5).merged(2) == Costs(forward=[3, 7], latency=5)
    assert Costs(forward=[1, 2, 3]).merged(2) == Costs(forward=[1, 2, 3])


def test_a_late_recompute_is_part_of_the_backward() -> None:
    late = Costs(1, 2, 3, recompute=4).recomputed_late(line(2))
    assert late.input_grad == (6, 6)
    assert late.recompute == 0
