"""A step and its parts: they add up, and each is what its name says."""

from dataclasses import replace

import pytest

from gapless.errors import ConfigError
from gapless.plan.cut.stage_costs import Stages, make_stages
from gapless.plan.predict.breakdown import Breakdown, breakdown
from gapless.plan.profile.machine import Device, Mesh, check_devices
from gapless.plan.profile.profile import Link, Profile, Seconds
from gapless.schedule import lower
from gapless.schedule.recipes import make_schedule
from gapless.schedule.simulate import simulate
from tests.plan import profiles

MS = 1e-3


def parts(
    profile: Profile,
    counts: list[int],
    name: str = "1f1b",
    microbatches: int = 8,
    mesh: Mesh | None = None,
    remat: bool = False,
) -> Breakdown:
    K = len(counts)
    mesh = mesh or Mesh(1, K)
    schedule = make_schedule(name, devices=K, microbatches=microbatches)
    if remat:
        schedule = lower.add_recompute(schedule, early=False)
    stages = make_stages(profile, counts, schedule.placement, mesh, [1.0] * K)
    timeline = simulate(schedule, stages.costs)
    found = breakdown(profile, stages, timeline, mesh)
    extra = found.update + max(mesh.sum_seconds(profile, device, size) for device, size in enumerate(gradients(stages)))
    assert found.total == pytest.approx(float(timeline.makespan) + extra)
    return found


def gradients(stages: Stages) -> list[int]:
    return [sum(layer.gradients for layer in own) for own in stages.layers]


def test_an_even_pipeline_has_compute_and_bubble_alone() -> None:
    found = parts(profiles.even(8, seconds=3 * MS), [2, 2, 2, 2])
    assert found.compute == pytest.approx(8 * 6 * MS)
    assert found.bubble == pytest.approx(3 * 6 * MS)  # (K-1)(f+b)
    assert (found.recompute, found.communication, found.update) == (0, 0, 0)
    assert found.imbalance == pytest.approx(0)


def test_uneven_stages_are_imbalance() -> None:
    found = parts(profiles.even(8, seconds=3 * MS), [1, 3, 2, 2])
    assert found.compute == pytest.approx(8 * 6 * MS)
    assert found.imbalance == pytest.approx(8 * 3 * MS)


def test_a_recompute_is_a_part_of_its_own() -> None:
    found = parts(profiles.even(8, seconds=3 * MS), [2, 2, 2, 2], "gpipe", remat=True)
    assert found.recompute == pytest.approx(8 * 2 * MS)


def test_hops_and_sums_of_gradients_are_communication() -> None:
    link = Link("link", None, 1 * MS, None)
    found = parts(profiles.even(8, [link], seconds=3 * MS), [2, 2, 2, 2], "gpipe")
    assert found.communication == pytest.approx(2 * 3 * MS)  # 2(K-1)c
    mesh = Mesh(2, 4)
    link = Link("link", None, 0.0, 2**30)
    two = parts(profiles.even(8, [link], seconds=3 * MS, boundary=0, parameters=2**20), [2, 2, 2, 2], mesh=mesh)
    assert two.communication == pytest.approx(2**21 / 2**30)  # 2 (R-1)/R of 2 MiB at 1 GiB/s


def test_the_slowest_update_counts() -> None:
    profile = profiles.even(4, seconds=3 * MS)
    layers = tuple(replace(layer, update=Seconds(number * MS)) for number, layer in enumerate(profile.layers))
    assert parts(replace(profile, layers=layers), [1, 3]).update == pytest.approx(6 * MS)


def test_links_that_differ_take_their_own_time() -> None:
    # Two devices per node: the hop from device 1 to 2 is the slow one, and gpipe waits for it once each way.
    links = [Link("inside", 2, 0.0, None), Link("outside", None, 0.0, 2**30)]
    profile = profiles.even(4, links, seconds=3 * MS, boundary=2**20)
    assert parts(profile, [1, 1, 1, 1], "gpipe", 1).communication == pytest.approx(2 / 1024)
    # With the replicas of a stage as neighbours every hop leaves the node.
    assert Mesh(2, 2, inside=True).hop(profile, 0, 1).name == "outside"
    assert Mesh(2, 2).hop(profile, 0, 1).name == "inside"
    assert Mesh(2, 2, inside=True).dimensions == (("pp", 2), ("dp", 2))


def test_devices_without_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="the speed of device 1 is 0, but it must be a number above 0"):
        check_devices([Device(), Device(speed=0)])
    with pytest.raises(ConfigError, match="the memory of device 0 is 0 bytes, but it must be above 0"):
        check_devices([Device(0)])
    with pytest.raises(ConfigError, match="there are no devices"):
        check_devices([])


def test_of_the_links_of_replicas_the_one_counts_that_holds_a_message_up_longest() -> None:
    # The latency was looked at only where bandwidths are equal.
    links = (Link("inside", 2, 0.0, 1e9), Link("outside", None, 1.0, 1e12))
    profile = profiles.even(4, links)
    assert Mesh(2, 2, order=(0, 1, 3, 4)).hop(profile, 0, 1).name == "outside"
