"""Devices of several kinds: a speed from two profiles, and a plan with every layer's own time."""

from dataclasses import replace

import pytest

from gapless.errors import ConfigError
from gapless.plan.profile.machine import Device
from gapless.plan.profile.profile import Profile
from gapless.plan.search.heterogeneous import KindSpeed, kind_of, own_seconds
from gapless.plan.search.search import search
from gapless.plan.search.search_options import SearchOptions
from gapless.schedule.simulate import simulate
from tests.plan import profiles

WANTED = SearchOptions(schedules=["1f1b"], microbatches=8)


def other(base: Profile, *times: float) -> Profile:
    """The same layers, each so many times as slow."""
    layers = [
        replace(profiles.layer(layer.work * slower, activation=layer.activation), name=layer.name)
        for layer, slower in zip(base.layers, times, strict=True)
    ]
    return replace(base, layers=tuple(layers), name="other")


def test_a_kind_has_the_speed_of_the_whole_model_and_that_of_its_layers() -> None:
    base = profiles.profile([profiles.layer(seconds) for seconds in (1.0, 2.0, 1.0, 1e-6)])
    assert kind_of(base, base) == KindSpeed(1.0, 1.0, 1.0)
    found = kind_of(base, other(base, 2, 4, 2, 100))
    assert found.speed == pytest.approx(4 / 12, rel=1e-3)
    assert (found.slowest, found.fastest) == pytest.approx((1 / 4, 1 / 2))  # the last layer takes no time to speak of
    with pytest.raises(
        ConfigError, match=r"other has 3 layers and test has 4: profiles of two kinds .* the same model"
    ):
        kind_of(base, replace(other(base, 1, 1, 1, 1), layers=base.layers[:3]))


def test_a_profile_of_another_microbatch_is_brought_to_the_same_size() -> None:
    base = profiles.even(4)
    assert kind_of(base, base.scaled(4)).speed == pytest.approx(1.0)


def test_where_all_layers_are_equally_slow_the_plan_was_right() -> None:
    base = profiles.even(6)
    slow = other(base, *[2.0] * 6)
    plan = search(base, [Device(), Device(), Device(speed=0.5)], WANTED, 8).best
    assert own_seconds(plan, base, [base, base, slow], [1, 1, 0.5]) == pytest.approx(plan.step_seconds)


def test_each_layer_takes_its_own_time_on_its_own_device() -> None:
    base = profiles.even(4)
    slow = other(base, 1.0, 1.0, 1.0, 5.0)
    plan = search(base, [Device(), Device(speed=0.5)], WANTED, 8).best
    placement = plan.schedule.placement
    ends = [sum(plan.partition[:stage]) for stage in range(len(plan.partition) + 1)]
    thirds = []
    for stage, home in enumerate(placement.homes):
        layers = (base, slow)[plan.mesh.device(0, home)].layers[ends[stage] : ends[stage + 1]]
        thirds.append(sum(layer.forward.median for layer in layers))
    costs = replace(plan.costs, forward=thirds, input_grad=thirds, weight_grad=thirds, backward=[2 * t for t in thirds])
    wanted = plan.step_seconds - plan.timeline.makespan + simulate(plan.schedule, costs).makespan
    assert own_seconds(plan, base, [base, slow], [1, 0.5]) == pytest.approx(wanted)
