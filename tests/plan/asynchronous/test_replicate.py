"""PipeDream's planner: held against every choice there is, and against what was published."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from pathlib import Path

import pytest

from gapless.errors import ConfigError, PlanError
from gapless.plan.asynchronous.replicate import _levels, _planned, replicate
from gapless.plan.asynchronous.stage_times import PIPEDREAM, RING
from gapless.plan.profile.file import read_profile
from gapless.plan.profile.machine import Mesh
from gapless.plan.profile.profile import Link, Profile
from gapless.schedule.asynchronous.weights import weight_versions
from gapless.schedule.costs import Costs
from gapless.schedule.memory import peaks
from gapless.schedule.recipes.pipedream import pipedream
from gapless.schedule.simulate import simulate
from tests.plan import profiles

PCIE = Link("pcie", 4, 0.0, 12e9)
ETHERNET = profiles.GIGABIT_10


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, total), parts - 1):
        yield tuple(end - start for start, end in pairwise((0, *cuts, total)))


def ring(weights: float, copies: int, latency: float, bandwidth: float) -> float:
    return 2 * (copies - 1) * (weights / (copies * bandwidth) + latency) if weights else 0.0


def hop(profile: Profile, behind: int, latency: float, bandwidth: float) -> float:
    """There and back."""
    return 2 * (profile.layers[behind - 1].boundary / bandwidth + latency)


def brute(profile: Profile, start: int, end: int, levels: list[tuple[float, float, int]]) -> float:
    """The least time of layers start..end on all parts of the last level, by trying every choice on every level."""
    *below, (latency, bandwidth, parts) = levels
    layers = profile.layers[start:end]
    best = float("inf")
    for stages in range(1, min(len(layers), parts) + 1):
        for counts in compositions(len(layers), stages):
            ends = [start, *(start + count for count in accumulate(counts))]
            for replicas in compositions(parts, stages):
                times = [hop(profile, at, latency, bandwidth) for at in ends[1:-1]]
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


@pytest.mark.parametrize("cases", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_one_level_is_the_best_of_all_choices(cases: int) -> None:
    chance = random.Random(cases)
    for _ in range(cases):
        bandwidth = chance.choice((1e6, 1e7, 4e7, 1e9))
        n, m = chance.randint(1, 6), chance.randint(1, 5)
        latency = chance.choice((0.0, 0.0, 0.1, 1.0))
        profile = profiles.some(chance, n, [Link("link", None, latency, bandwidth)])
        found = _planned(profile, [(profile.links[0], m)], RING, None, straight=False)
        assert found is not None
        assert found.slowest == pytest.approx(brute(profile, 0, n, [(latency, bandwidth, m)]), rel=1e-9)
        assert sum(found.partition) == n
        assert found.num_devices == m
        times = judged(profile, found.partition, found.replicas, latency, bandwidth)
        assert times == pytest.approx(found.slowest, rel=1e-9)
        assert replicate(profile, m).seconds <= found.seconds  # data parallelism alone may be quicker


def judged(
    profile: Profile, partition: tuple[int, ...], replicas: tuple[int, ...], latency: float, bandwidth: float
) -> float:
    ends = [0, *accumulate(partition)]
    times = [hop(profile, at, latency, bandwidth) for at in ends[1:-1]]
    for (first, last), copies in zip(pairwise(ends), replicas, strict=True):
        own = profile.layers[first:last]
        alone = sum(layer.forward.median + layer.whole_backward for layer in own)
        weights = sum(layer.gradients for layer in own)
        times.append(max(alone, copies * ring(weights, copies, latency, bandwidth)) / copies)
    return max(times)


@pytest.mark.parametrize("cases", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_two_levels_are_the_best_of_all_choices(cases: int) -> None:
    chance = random.Random(cases)
    for _ in range(cases):
        inner, outer = chance.choice((1e8, 1e9)), chance.choice((1e6, 1e7, 1e8))
        n, m, groups = chance.randint(1, 5), chance.choice((2, 3)), chance.choice((2, 3))
        near, far = chance.choice(((0.0, 0.0), (0.01, 0.1)))
        links = [Link("inner", m, near, inner), Link("outer", None, far, outer)]
        levels = [(near, inner, m), (far, outer, groups)]
        profile = profiles.some(chance, n, links)
        found = _planned(profile, _levels(links, m * groups), RING, None, straight=False)
        assert found is not None
        assert found.slowest == pytest.approx(brute(profile, 0, n, levels), rel=1e-9)
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
    with pytest.raises(PlanError, match="6 devices can't be shared out into groups of 4"):
        replicate(profiles.even(8, [PCIE, ETHERNET]), 6)
    with pytest.raises(ConfigError, match="the links of the profile reach 4 devices, but there are 8: add the link "):
        replicate(profiles.even(8, [PCIE]), 8)


def test_sixty_layers_on_two_levels_are_planned_quickly() -> None:
    profile = profiles.some(random.Random(0), 60, [Link("inner", 8, 0.0, 1e9), Link("outer", None, 0.0, 1e8)])
    found = replicate(profile, 32)
    assert sum(found.partition) == 60
    assert found.num_devices == 32


# -- PipeDream's own plans -------------------------------------------------------------------------------------------

PUBLISHED = Path(__file__).parents[3] / "examples" / "profiles"
GIGABYTE = (Link("link", None, 0.0, 1e9),)  # what its optimizer takes unless told
MACHINES_OF_4 = (Link("machine", 4, 0.0, 1e10), Link("network", None, 0.0, 1e9))


def published(model: str, links: Sequence[Link]) -> Profile:
    return replace(read_profile(PUBLISHED / f"{model}.txt"), links=tuple(links))


def times_alone(profile: Profile, partition: Sequence[int]) -> list[float]:
    ends = accumulate(partition)
    return [
        sum(layer.work for layer in profile.layers[end - count : end])
        for end, count in zip(ends, partition, strict=True)
    ]


@pytest.mark.parametrize(
    ("model", "replicas", "seconds", "stages"),
    [
        # What PipeDream's optimizer prints for these profiles, with its defaults and hops counted (-n 4,
        # --activation_compression_ratio 1): replicas, time per minibatch, and the time of each stage's layers.
        ("vgg16", (3, 1), 0.205520896, [0.514238, 0.158297]),
        ("alexnet", (3, 1), 0.034217141333, [0.076308, 0.009013]),
        ("resnet50", (2, 2), 0.162880924, [0.295283, 0.148136]),
        ("gnmt", (1, 1, 1, 1), 0.025868, [0.021096, 0.025074, 0.017378, 0.025868]),
    ],
)
def test_the_plans_of_pipedreams_optimizer_come_out_under_its_own_form(
    model: str, replicas: tuple[int, ...], seconds: float, stages: list[float]
) -> None:
    profile = published(model, GIGABYTE)
    found = replicate(profile, 4, form=PIPEDREAM)
    assert found.replicas == replicas
    assert found.seconds == pytest.approx(seconds, rel=1e-9)
    assert times_alone(profile, found.partition) == pytest.approx(stages, abs=1e-9)


@pytest.mark.parametrize(
    ("model", "links", "devices", "seconds"),
    [
        ("vgg16", GIGABYTE, 16, 0.056529767384615),
        ("vgg16", MACHINES_OF_4, 16, 0.069749941466667),
        ("alexnet", GIGABYTE, 16, 0.018874368),
        ("alexnet", MACHINES_OF_4, 16, 0.018874368),
        ("resnet50", GIGABYTE, 16, 0.047801345306122),
        ("gnmt", GIGABYTE, 16, 0.019285),
        ("gnmt", MACHINES_OF_4, 16, 0.012582912),
        pytest.param("resnet50", MACHINES_OF_4, 16, 0.047042024, marks=pytest.mark.slow),
    ],
)
def test_its_times_on_sixteen_devices_and_two_levels_of_links_are_the_same_too(
    model: str, links: Sequence[Link], devices: int, seconds: float
) -> None:
    found = replicate(published(model, links), devices, form=PIPEDREAM)
    assert found.seconds == pytest.approx(seconds, rel=1e-9)


def test_vgg_16_is_cut_where_the_published_stages_are() -> None:
    # Its first stage has 17 operators, up to the pooling behind the third block.
    profile = published("vgg16", GIGABYTE)
    found = replicate(profile, 4, form=PIPEDREAM)
    assert found.partition == (17, 23)
    assert profile.layers[16].name == "node18 MaxPool2d"


def test_each_form_calls_its_own_plan_the_best() -> None:
    # ResNet-50: 2-2 by PipeDream's form, 3-1 by a ring's that runs beside the computation.
    profile = published("resnet50", GIGABYTE)
    assert str(replicate(profile, 4, form=PIPEDREAM)) == "2-2"
    assert str(replicate(profile, 4)) == "3-1"


# -- latency and memory ----------------------------------------------------------------------------------------------


def period(replicas: Sequence[int], costs: Costs) -> float:
    """The time from one minibatch to the next, simulated, once the pipeline is full."""
    each = math.lcm(*replicas, sum(replicas)) * 4
    ends = [simulate(pipedream(sum(replicas), n, replicas), costs).makespan for n in (each, 2 * each)]
    return float(ends[1] - ends[0]) / each


@pytest.mark.parametrize("latency", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("devices", [2, 3, 5])
def test_the_time_of_a_straight_pipeline_is_the_simulated_one(devices: int, latency: float) -> None:
    # A hop costs time however quick it is beside a stage: only so many minibatches are under way.
    profile = profiles.even(devices, [Link("link", None, latency, None)], seconds=3.0, boundary=1)
    found = replicate(profile, devices, straight=True)
    assert found.replicas == (1,) * devices
    simulated = period(found.replicas, Costs(forward=1, input_grad=1, weight_grad=1, latency=latency))
    assert found.seconds == pytest.approx(simulated, rel=1e-9)


def test_where_hops_are_slow_one_stage_on_all_devices_is_better() -> None:
    layers = [profiles.layer(1.0, parameters=1000, boundary=1) for _ in range(4)]
    near, far = (profiles.profile(layers, [Link("link", None, latency, 1e9)]) for latency in (0.0, 0.5))
    assert replicate(far, 2).replicas == (2,)
    assert replicate(far, 2).seconds == pytest.approx(2.0)
    assert replicate(near, 2, straight=True).seconds == pytest.approx(2.0)
    assert replicate(far, 2, straight=True).seconds == pytest.approx((4.0 + 2 * 0.5) / 2)


def needed(profile: Profile, partition: Sequence[int], replicas: Sequence[int]) -> int:
    """Of the fullest device: weights and activations of every minibatch that it has begun, counted in the schedule."""
    schedule = pipedream(sum(replicas), 12 * math.lcm(*replicas), replicas)
    kept = weight_versions(schedule).kept
    most, ends = 0, list(accumulate(partition))
    for stage, (end, count) in enumerate(zip(ends, partition, strict=True)):
        layers = profile.layers[end - count : end]
        weights = sum(kept[stage] * layer.parameters + layer.gradients + layer.optimizer_state for layer in layers)
        held = max(peaks(schedule, Costs(activation=[int(s == stage) for s in range(len(partition))])))
        most = max(most, weights + math.ceil(int(held) * sum(layer.activation for layer in layers) * 1.05))
    return most


def test_a_memory_limit_gives_the_best_of_the_choices_that_fit() -> None:
    chance = random.Random(5)
    seen = set()
    for _ in range(40):
        n, m = chance.randint(2, 5), chance.randint(2, 4)
        profile = profiles.some(chance, n, [Link("link", None, 0.0, 1e9)])
        limit = chance.choice((60, 120, 200, 400)) * profiles.MIB
        fitting = [
            judged(profile, counts, replicas, 0.0, 1e9)
            for stages in range(1, min(n, m) + 1)
            for counts in compositions(n, stages)
            for replicas in compositions(m, stages)
            if needed(profile, counts, replicas) <= limit
        ]
        seen.add(bool(fitting))
        if fitting:
            found = replicate(profile, m, memory=limit)
            assert found.slowest == pytest.approx(min(fitting), rel=1e-9)
            assert max(found.memory) == needed(profile, found.partition, found.replicas)
        else:
            with pytest.raises(PlanError, match=r"fits on . devices? with .* MiB: use more devices, or larger ones"):
                replicate(profile, m, memory=limit)
    assert seen == {False, True}


def test_two_levels_that_do_not_fit_are_planned_as_one() -> None:
    links = [Link("inner", 2, 0.0, 1e12), Link("outer", None, 0.0, 1e12)]
    profile = profiles.even(4, links, seconds=1.0, parameters=10 * profiles.MIB)
    free = replicate(profile, 4)
    assert free.replicas == (4,)
    tight = replicate(profile, 4, memory=max(free.memory) - 1)
    assert max(tight.memory) < max(free.memory)
    assert len(tight.replicas) > 1
