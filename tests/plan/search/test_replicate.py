"""PipeDream's planner: held against every choice there is, and against what was published."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import pytest

from gapless.errors import ConfigError, PlanError
from gapless.plan.profile.machine import Mesh
from gapless.plan.profile.profile import Link, Profile
from gapless.plan.search.replicate import replicate
from tests.plan import profiles

PCIE = Link("pcie", 4, 0.0, 12e9)
ETHERNET = profiles.GIGABIT_10


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, total), parts - 1):
        yield tuple(end - start for start, end in pairwise((0, *cuts, total)))


def ring(weights: float, copies: int, latency: float, bandwidth: float) -> float:
    return 2 * (copies - 1) * (weights / (copies * bandwidth) + latency) if weights else 0.0


def brute(profile: Profile, start: int, end: int, levels: list[tuple[float, float, int]]) -> float:
    """The least time of layers start..end on all parts of the last level, by trying every choice on every level."""
    *below, (latency, bandwidth, parts) = levels
    layers = profile.layers[start:end]
    best = float("inf")
    for stages in range(1, min(len(layers), parts) + 1):
        for counts in compositions(len(layers), stages):
            ends = [start, *(start + count for count in accumulate(counts))]
            for replicas in compositions(parts, stages):
                times = [2 * profile.layers[at - 1].boundary / bandwidth for at in ends[1:-1]]
                for (first, last), copies in zip(pairwise(ends), replicas, strict=True):
                    own = profile.layers[first:last]
                    alone = (
                        brute(profile, first, last, below)
                        if below
                        else sum(layer.forward.median + layer.whole_backward for layer in own)
                    )
                    weights = sum(layer.gradients for layer in own)
                    times.append(max(alone, copies * ring(weights, copies, latency, bandwidth)) / copies)
                best = min(best, max(times))
    return best


@pytest.mark.parametrize("cases", [1500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_one_level_is_the_best_of_all_choices(cases: int) -> None:
    chance = random.Random(cases)
    for _ in range(cases):
        bandwidth = chance.choice((1e6, 1e7, 4e7, 1e9))
        n, m = chance.randint(1, 6), chance.randint(1, 5)
        latency = chance.choice((0.0, 0.0, 0.1, 1.0))
        profile = profiles.some(chance, n, [Link("link", None, latency, bandwidth)])
        found = replicate(profile, m)
        assert found.seconds == pytest.approx(brute(profile, 0, n, [(latency, bandwidth, m)]), rel=1e-9)
        assert sum(found.partition) == n
        assert found.num_devices == m
        times = judged(profile, found.partition, found.replicas, latency, bandwidth)
        assert times == pytest.approx(found.seconds, rel=1e-9)


def judged(
    profile: Profile, partition: tuple[int, ...], replicas: tuple[int, ...], latency: float, bandwidth: float
) -> float:
    ends = [0, *accumulate(partition)]
    times = [2 * profile.layers[at - 1].boundary / bandwidth for at in ends[1:-1]]
    for (first, last), copies in zip(pairwise(ends), replicas, strict=True):
        own = profile.layers[first:last]
        alone = sum(layer.forward.median + layer.whole_backward for layer in own)
        weights = sum(layer.gradients for layer in own)
        times.append(max(alone, copies * ring(weights, copies, latency, bandwidth)) / copies)
    return max(times)


@pytest.mark.parametrize("cases", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_two_levels_are_the_best_of_all_choices(cases: int) -> None:
    chance = random.Random(cases)
    for _ in range(cases):
        inner, outer = chance.choice((1e8, 1e9)), chance.choice((1e6, 1e7, 1e8))
        n, m, groups = chance.randint(1, 5), chance.choice((2, 3)), chance.choice((2, 3))
        near, far = chance.choice(((0.0, 0.0), (0.01, 0.1)))
        links = [Link("inner", m, near, inner), Link("outer", None, far, outer)]
        levels = [(near, inner, m), (far, outer, groups)]
        profile = profiles.some(chance, n, links)
        found = replicate(profile, m * groups)
        assert found.seconds == pytest.approx(brute(profile, 0, n, levels), rel=1e-9)
        assert sum(found.partition) == n
        assert found.num_devices == m * groups


@pytest.mark.parametrize("latency", [0.0, 0.25])
@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_replicas_of_a_stage_and_of_a_mesh_sum_their_gradients_in_the_same_time(replicas: int, latency: float) -> None:
    # Latency was in one of them, and the formula was there twice.
    link = Link("link", None, latency, 1e9)
    profile = profiles.profile([profiles.layer(0.0, parameters=10**9, boundary=0)], [link])
    ring = 2 * (replicas - 1) * (1.0 / replicas + latency)
    assert Mesh(replicas, 1).sum_seconds(profile, 0, 10**9) == pytest.approx(ring)
    assert replicate(profile, replicas).seconds == pytest.approx(ring)


def test_without_gradients_there_is_nothing_to_sum() -> None:
    link = Link("link", None, 1.0, 1e9)
    profile = profiles.profile([profiles.layer(4.0, parameters=0)], [link])
    assert Mesh(4, 1).sum_seconds(profile, 0, 0) == 0
    assert replicate(profile, 4).seconds == pytest.approx(1.0)


def test_vgg_16_has_its_convolutions_replicated_and_its_fully_connected_tail_on_one_device() -> None:
    # As published for 16 devices: 15-1.
    flat = replicate(replace(profiles.vgg16(), links=(ETHERNET,)), 16)
    assert str(flat) == "15-1"
    assert flat.partition == (12, 4)
    assert flat.in_flight == 2
    # In groups of 4 devices three groups replicate, and in the last one nothing is worth it.
    grouped = replicate(replace(profiles.vgg16(), links=(PCIE, ETHERNET)), 16)
    assert str(grouped) == "12-1-1-1-1"
    assert grouped.partition[0] == 10


def test_recurrent_layers_make_a_straight_pipeline() -> None:
    for links in ((ETHERNET,), (PCIE, ETHERNET)):
        found = replicate(replace(profiles.lstm(), links=links), 8)
        assert found.replicas == (1,) * 8
        assert found.partition == (1,) * 8
        assert found.in_flight == 8


def test_few_weights_and_wide_boundaries_are_plain_data_parallelism() -> None:
    # As published for ResNet-50: all devices replicate everything.
    found = replicate(profiles.even(8, [ETHERNET], seconds=1.0, parameters=1000, boundary=2**32), 4)
    assert (found.partition, found.replicas) == ((8,), (4,))
    assert found.seconds == pytest.approx(2.0)


def test_devices_that_do_not_fill_their_groups_are_refused() -> None:
    with pytest.raises(PlanError, match="6 devices are not a whole number of groups of 4"):
        replicate(profiles.even(8, [PCIE, ETHERNET]), 6)
    with pytest.raises(ConfigError, match="the links of the profile reach 4 devices, but there are 8: add the link "):
        replicate(profiles.even(8, [PCIE]), 8)


def test_sixty_layers_on_two_levels_are_planned_quickly() -> None:
    profile = profiles.some(random.Random(0), 60, [Link("inner", 8, 0.0, 1e9), Link("outer", None, 0.0, 1e8)])
    found = replicate(profile, 32)
    assert sum(found.partition) == 60
    assert found.num_devices == 32
