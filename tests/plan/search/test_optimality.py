"""Is the plan the best there is? Against every plan of small models, and against itself with more to choose from."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from gapless.errors import PlanError
from gapless.plan.profile.file import parse_profile
from gapless.plan.profile.machine import Device
from gapless.plan.profile.profile import Link, Profile
from gapless.plan.search.search import Found, search
from gapless.plan.search.search_options import SearchOptions
from tests.plan import profiles
from tests.plan.search.brute import Case, best_of_all, some_case

MS, GIB, MIB = 1e-3, 2**30, 2**20


def found_for(case: Case) -> Found | None:
    wanted = SearchOptions(
        microbatches=case.microbatches, schedules=case.recipes, replicas=case.replicas, time_limit=None, slack=0.0
    )
    try:
        return search(case.profile, case.devices, wanted, case.minibatch)
    except PlanError:
        return None


def held_against_all(seed: int) -> None:
    case = some_case(random.Random(seed))
    found, best = found_for(case), best_of_all(case)
    assert (found is None) == (best is None), seed
    if found is not None and best is not None:
        step = found.best.step_seconds
        assert step <= 1.01 * best, (seed, step, best)
        assert best >= step * (1 - found.searched.gap) * (1 - 1e-9), (seed, step, best, found.searched)


def test_no_plan_of_a_small_model_is_better() -> None:
    for seed in (1, 2, 4, 5):
        held_against_all(seed)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_no_plan_of_300_small_models_is_better() -> None:
    for seed in range(300):
        held_against_all(1000 + seed)


# -- more is never slower ---------------------------------------------------------------------------------------------


def step_of(
    profile: Profile,
    devices: list[Device],
    minibatch: int,
    replicas: bool,
    microbatches: int | None,
    recipes: list[str],
) -> tuple[float, float]:
    """The step, and the gap that is printed; without end where nothing fits."""
    wanted = SearchOptions(microbatches=microbatches, schedules=recipes, replicas=replicas, time_limit=None)
    try:
        found = search(profile, devices, wanted, minibatch)
    except PlanError:
        return float("inf"), 0.0
    return found.best.step_seconds, found.searched.gap


KINDS = ("memory of all", "memory of one", "device", "speed", "bandwidth", "microbatches")


def never_slower(seed: int, layers: tuple[int, int] = (2, 9)) -> None:
    """With more memory, devices, or microbatches to choose from, exactly; with more speed within what is printed."""
    chance = random.Random(seed)
    link = Link("link", None, chance.choice((0.0, 0.2)), chance.choice((2.0, 8.0)) * MIB)
    profile = profiles.some(chance, chance.randint(*layers), [link])
    K, minibatch = chance.randint(1, 5), chance.choice((4, 6, 8, 12, 16))
    memory = chance.choice((None, chance.randint(40, 400) * MIB))
    slow = chance.random() < 0.3
    devices = [Device(memory, chance.choice((0.5, 1.0)) if slow else 1.0) for _ in range(K)]
    recipes = chance.sample(["1f1b", "gpipe", "zb-h1", "zb-v", "interleaved", "v-half"], 2)
    replicas, M = chance.random() < 0.5, chance.choice((None, 4))
    kind = KINDS[seed % len(KINDS)]
    more, bigger, M_more = list(devices), profile, M
    if kind == "memory of all":
        more = [
            replace(d, memory=None if memory is None else int(memory * chance.uniform(1, 1.6)) + 1) for d in devices
        ]
    elif kind == "memory of one":
        more[0] = replace(more[0], memory=None if memory is None else memory + chance.choice((1, 20 * MIB)))
    elif kind == "device":
        more.append(Device(memory, chance.choice((0.5, 1.0))))
    elif kind == "speed":
        more[0] = replace(more[0], speed=more[0].speed * chance.choice((1.01, 1.5)))
    elif kind == "bandwidth":
        bigger = replace(profile, links=(replace(link, bandwidth=2 * (link.bandwidth or 1)),))
    else:
        M, M_more = 4, None
    before, _ = step_of(profile, devices, minibatch, replicas, M, recipes)
    after, gap = step_of(bigger, more, minibatch, replicas, M_more, recipes)
    allowed = gap if kind in ("speed", "bandwidth") else 0.0
    assert after * (1 - allowed) <= before * (1 + 1e-9), (seed, kind, before, after, gap)


def test_more_of_anything_is_never_slower() -> None:
    for seed in range(12):
        never_slower(seed)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_more_of_anything_is_never_slower_in_500_pairs() -> None:
    for seed in range(500):
        never_slower(100 + seed)


def five_layers(devices: list[Device], minibatch: int = 16) -> float:
    times = (3 * MS, 3 * MS, 3 * MS, 3 * MS, 24 * MS)
    profile = profiles.profile([profiles.layer(seconds, 0, 0, 0) for seconds in times])
    return search(profile, devices, SearchOptions(replicas=True, time_limit=None), minibatch).best.step_seconds


def test_another_device_byte_or_share_of_speed_never_slows_five_layers_down() -> None:
    # 144 ms on 4 devices; it was 388 on 5, or with a byte or 1% of speed more on one, and 412 with 17 samples.
    four = five_layers([Device()] * 4)
    assert four == pytest.approx(144 * MS)
    assert five_layers([Device()] * 5) <= four * (1 + 1e-9)
    limited = five_layers([Device(10 * GIB)] * 4)
    assert five_layers([*[Device(10 * GIB)] * 3, Device(10 * GIB + 1)]) <= limited * (1 + 1e-9)
    assert five_layers([*[Device()] * 3, Device(speed=1.01)]) <= four * (1 + 1e-9)
    assert five_layers([Device()] * 4, 17) <= four * 20 / 16 * (1 + 1e-9)


def test_a_byte_more_on_one_device_keeps_pipelines_within_their_links() -> None:
    # Two pipelines of four, each on quick links; only sums of gradients, which are small here, cross to the others.
    links = [Link("inside", 4, 1e-6, 2e11), Link("outside", None, 1e-5, 5e9)]
    profile = profiles.even(8, links, seconds=3 * MS, parameters=1000, activation=MIB, boundary=50 * MIB)
    wanted = SearchOptions(schedules=["1f1b"], replicas=True, microbatches=4, time_limit=None)
    alike = search(profile, [Device(GIB)] * 8, wanted, 8).best
    assert (alike.mesh.replicas, alike.num_devices) == (2, 4)
    for place in (0, 7):
        more = [Device(GIB + (number == place)) for number in range(8)]
        assert search(profile, more, wanted, 8).best.step_seconds <= alike.step_seconds * (1 + 1e-9)


def test_more_devices_never_slow_twelve_equal_layers_down() -> None:
    # It was 144 ms on 6 devices and 152 on 7; 100, 112 and 144 on 9, 10 and 11.
    profile = profiles.even(12, seconds=3 * MS, parameters=0, activation=0, boundary=0)
    steps = []
    for K in range(6, 12):
        wanted = SearchOptions(schedules=["1f1b", "zb-h1"], time_limit=None)
        steps.append(search(profile, [Device()] * K, wanted, 16).best.step_seconds)
    assert steps == sorted(steps, reverse=True)


# -- what plans left behind -------------------------------------------------------------------------------------------


def limited(memory: int, recipes: list[str], **more: Any) -> Found:
    """Eight blocks on 4 devices, whose activations fill them."""
    profile = profiles.even(8, seconds=30 * MS, parameters=16 * MIB, activation=100 * MIB, boundary=4 * MIB)
    wanted = SearchOptions(schedules=recipes, microbatches=16, time_limit=None, **more)
    return search(profile, [Device(memory * MIB)] * 4, wanted, 16)


def test_auto_recomputes_where_that_is_quicker() -> None:
    # It kept to what fits without recomputes: few microbatches at a time, and idle devices.
    room = 480
    alone, named = limited(room, ["auto"]).best, limited(room, ["1f1b"]).best
    assert set(named.remat) != {"none"}
    assert alone.step_seconds <= named.step_seconds * 1.01


def test_stages_are_recomputed_layer_by_layer_where_nothing_else_fits() -> None:
    with pytest.raises(PlanError, match="nothing fits"):
        limited(310, ["1f1b"], remat=("stage",))
    best = limited(310, ["1f1b"]).best
    assert "layer" in best.remat
    assert "remat layer by layer" in best.title
    assert all(held.total <= 310 * MIB for held in best.memory)


def test_the_order_in_which_unlike_devices_are_given_does_not_matter() -> None:
    profile = profiles.even(8, seconds=30 * MS, parameters=16 * MIB, activation=100 * MIB, boundary=4 * MIB)
    steps = set()
    for memories in ([400, 900, 900, 900], [900, 900, 900, 400], [900, 400, 900, 900]):
        wanted = SearchOptions(schedules=["1f1b"], microbatches=8, time_limit=None)
        best = search(profile, [Device(size * MIB) for size in memories], wanted, 8).best
        steps.add(float(f"{best.step_seconds:.9g}"))
        assert best.limits == tuple(memories[best.mesh.device(0, place)] * MIB for place in range(best.num_devices))
    assert len(steps) == 1


def test_plain_training_and_data_parallelism_are_among_the_plans() -> None:
    # A slow link: no pipeline is as quick as one device alone, and with replicas each has a share of the samples.
    link = Link("slow", None, 50 * MS, 1e9)
    profile = profiles.even(4, [link], seconds=3 * MS, parameters=1000, activation=0, boundary=1000)
    alone = search(profile, 4, SearchOptions(microbatches=4, time_limit=None), 4)
    assert (alone.best.num_devices, alone.best.idle_devices) == (1, 3)
    assert alone.best.searched is not None
    fast = profiles.even(4, seconds=3 * MS, parameters=0)
    best = search(fast, 4, SearchOptions(replicas=True, time_limit=None), 16).best
    assert (best.mesh.replicas, best.num_devices) == (4, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_devices", [8, 16, 32, 64, 128])
def test_96_layers_are_planned_to_the_end_or_nearly(num_devices: int) -> None:
    # Within the default limit it was 221.7 s on 8 devices, and the best was found after 110 s.
    block = {"name": "block", "repeat": 94, "forward": "9 ms", "parameters": "700 MiB", "activation": "900 MiB"}
    ends = ({"name": "embedding", "forward": "0.3 ms", "activation": "48 MiB"}, {"name": "head", "forward": "20 ms"})
    layers = [
        {**ends[0], "parameters": "600 MiB", "boundary": "48 MiB"},
        {**block, "boundary": "48 MiB"},
        {**ends[1], "parameters": "600 MiB", "activation": "1200 MiB", "boundary": "4 B"},
    ]
    links = [
        {"name": "inside", "devices": 8, "latency": "8 us", "bandwidth": "200 GB/s"},
        {"name": "outside", "latency": "20 us", "bandwidth": "25 GB/s"},
    ]
    profile = parse_profile(json.dumps({"layers": layers, "links": links}))
    found = search(profile, [Device(80 * GIB)] * num_devices, SearchOptions(replicas=True, time_limit=None), 512)
    assert found.complete or found.searched.gap <= 0.03
    assert num_devices > 8 or found.best.step_seconds <= 171
