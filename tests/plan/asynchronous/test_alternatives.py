"""What is listed beside plans: its times and bytes, by hand, and when it is not listed."""

from dataclasses import replace

import pytest

from gapless.plan.asynchronous.alternatives import Alternative, alternatives
from gapless.plan.profile.contention import Contention
from gapless.plan.profile.machine import Device
from gapless.plan.profile.profile import Link, Profile, Seconds
from gapless.plan.search.search import search
from gapless.plan.search.search_options import SearchOptions
from tests.plan import profiles

MS, MIB = 1e-3, 2**20


def beside(profile: Profile, devices: list[Device], minibatch: int, microbatches: int) -> dict[str, Alternative]:
    wanted = SearchOptions(schedules=["1f1b"], microbatches=microbatches, time_limit=None)
    best = search(profile, devices, wanted, minibatch).best
    return {other.name: other for other in alternatives(profile, devices, best)}


def test_without_a_flush_every_microbatch_takes_as_long_as_the_slowest_stage() -> None:
    profile = profiles.even(8, seconds=3 * MS, parameters=MIB, activation=MIB)
    found = beside(profile, [Device()] * 4, 16, 16)
    assert set(found) == {"pipedream", "2bw"}
    assert {other.why for other in found.values()} == {"asynchronous"}
    assert [other.seconds for other in found.values()] == [pytest.approx(16 * 6 * MS)] * 2
    # Two layers of the first stage: gradients and Adam's state, versions of the parameters, 4 microbatches under way.
    two = found["2bw"]
    assert two.partition == (2, 2, 2, 2)
    assert two.memory == pytest.approx(2 * (3 + 2) * MIB + 1.05 * 8 * MIB, abs=1)
    updated = replace(profile, layers=tuple(replace(layer, update=Seconds(MS)) for layer in profile.layers))
    later = beside(updated, [Device()] * 4, 16, 16)
    assert later["2bw"].seconds == pytest.approx((16 * 6 + 2) * MS)  # one update for all of them
    assert later["pipedream"].seconds == pytest.approx(16 * 8 * MS)  # one for each


def test_what_does_not_fit_is_not_listed() -> None:
    profile = profiles.even(8, seconds=3 * MS, parameters=MIB, activation=MIB)
    two = beside(profile, [Device()] * 4, 16, 16)["2bw"]
    assert "2bw" in beside(profile, [Device(two.memory)] * 4, 16, 16)
    assert "2bw" not in beside(profile, [Device(two.memory - 1)] * 4, 16, 16)


def test_stages_with_replicas_of_their_own_say_what_they_would_bring() -> None:
    # One stage of 4 ms on one device, and three times as much on three, which share out each microbatch.
    layers = [profiles.layer(seconds * MS, MIB, MIB, 0) for seconds in (12, 36)]
    profile = profiles.profile(layers, [Link("link", None, 0.0, 1e12)], samples=3)
    found = beside(profile, [Device()] * 4, 24, 8)["dapple"]
    assert (found.why, found.replicas) == ("not runnable yet", (1, 3))
    # 1f1b of two stages with 12 ms each: 8 microbatches, and one more while it fills and drains; then the sum.
    assert found.seconds == pytest.approx(9 * 12 * MS, rel=1e-3)
    assert found.seconds > 9 * 12 * MS


def test_nothing_is_listed_of_what_is_not_known() -> None:
    profile = profiles.even(8, seconds=3 * MS)
    assert not beside(replace(profile, contention=Contention(forward=1.5)), [Device()] * 4, 16, 16)
    assert not beside(profile, [Device(), Device(speed=0.5)], 16, 16)
    assert not beside(profile, [Device(speed=0.5)] * 2, 16, 16)  # links have the speed they have
    assert not beside(profile, [Device()], 16, 16)
