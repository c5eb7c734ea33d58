"""The bound is below everything: attacked with random cuts, recipes, speeds, links, remat and lowering."""

import random
from dataclasses import replace

import pytest

from gapless.plan.cut.stage_costs import make_stages
from gapless.plan.predict.breakdown import breakdown
from gapless.plan.predict.footprint import footprints
from gapless.plan.profile.contention import Contention
from gapless.plan.profile.machine import Device, Mesh
from gapless.plan.profile.profile import EntryTime, Layer, Link, Profile, Seconds
from gapless.plan.search.bounds.bound import Bounds, CutBounds
from gapless.plan.search.bounds.fixed_order import followed_at_once, least_in_order
from gapless.plan.search.bounds.least_work import Limits, layer_works
from gapless.plan.search.choices import RECIPES
from gapless.plan.search.search import search
from gapless.plan.search.search_options import SearchOptions
from gapless.schedule.lower import Passes, lowered
from gapless.schedule.recipes import find_recipe, make_schedule
from gapless.schedule.simulate import simulate
from tests.plan import profiles

MS = 1e-3


def some_layer(chance: random.Random) -> Layer:
    forward, inputs, weights = (Seconds(chance.choice((0.0, 0.5, 1, 1, 2, 7))) for _ in range(3))
    whole = chance.choice((None, Seconds((inputs.median + weights.median) * chance.uniform(0.4, 1.6))))
    sizes = chance.choice((0, 1000)), chance.choice((0, 500, 1000, 5000)), chance.choice((0, 1, 5))
    made = replace(profiles.layer(1.0, *sizes), gradients=chance.choice((0, 3, 20)))
    made = replace(made, forward=forward, input_grad=inputs, weight_grad=weights, backward=whole)
    again = Seconds(chance.choice((1.0, 1.0, 0.5, 1.5)) * forward.median)
    return replace(made, recompute=again, update=Seconds(chance.choice((0.0, 0.3))))


def attack(seed: int) -> float:
    """The bound of a random choice against a random plan of it; how near it is."""
    chance = random.Random(seed)
    K, M, R = chance.randint(1, 4), chance.choice((1, 2, 3, 5, 9)), chance.choice((1, 1, 2))
    recipe = chance.choice((*RECIPES, *["auto"] * 4)) if K > 1 else "1f1b"
    each = chance.choice(find_recipe(recipe).stages_per_device or (2, 3))
    links = (Link("link", None, chance.choice((0.0, 0.4)), chance.choice((None, 5.0))),)
    even = chance.random() < 0.4  # layers and devices that are alike, but for the ends
    kinds = [some_layer(chance) for _ in range(2)]
    layers = tuple(
        chance.choices(kinds, (4, 1))[0] if even else some_layer(chance)
        for _ in range(K * each + chance.randint(0, 8 if even else 4))
    )
    entry = EntryTime(*(chance.choice((0.0, 0.2)) for _ in range(2)))
    forward, whole, halves = (chance.choice((1.0, 1.0, 1.5, 2.5)) for _ in range(3))
    slower = Contention(forward, whole, halves, at_once=chance.choice((None, None, 1.5)))
    profile, mesh = Profile("", layers, links, entry=entry, contention=slower), Mesh(R, K)
    speeds = [1.0 if even else chance.choice((1.0, 1.0, 0.5, 2.0)) for _ in range(K)]
    cuts = sorted(chance.sample(range(1, len(layers)), K * each - 1))
    counts = [end - start for start, end in zip((0, *cuts), (*cuts, len(layers)), strict=True)]
    sizes = {"devices": K, "microbatches": M, "stages_per_device": each}
    plain = make_schedule(recipe, **sizes)  # type: ignore[arg-type]
    stages = make_stages(profile, counts, plain.placement, mesh, speeds)
    if recipe in ("auto", "v-half", "v-min"):
        room = None
        if recipe == "auto":  # in little memory, where devices wait for what was begun
            held = stages.costs.per_stage("activation", plain.placement)
            room = max(sum(held[stage] for stage in own) for own in plain.placement.stages) * chance.choice((1, 1.5, 3))
            room = room or None  # layers that hold nothing need none
        plain = make_schedule(recipe, **sizes, costs=stages.costs, memory_limit=room)  # type: ignore[arg-type]
    remat = [chance.choice(("none", "none", "none", "stage", "layer")) for _ in range(K * each)]
    stages = make_stages(profile, counts, plain.placement, mesh, speeds, remat)
    again = [stage for stage, mode in enumerate(remat) if mode == "stage"]
    drafted = lowered(plain, stages.costs, Passes(recompute=again, early=False))
    stages = replace(stages, costs=slower.costs(stages.costs, drafted, R))
    schedule = lowered(plain, stages.costs, Passes(split=True, fuse=True, recompute=again, early=True))
    timeline = simulate(schedule, stages.costs)
    cut = CutBounds(profile, plain.placement, speeds, M, recipe).seconds(counts)
    assert cut <= float(timeline.makespan), seed
    # With no more memory than it takes.
    peaks = [float(device.total) for device in footprints(profile, stages, timeline)]
    limits = Limits(tuple(peaks) if chance.random() < 0.5 else (max(peaks),) * K, 1, profile.slack)
    least = Bounds(profile).seconds(recipe, each, mesh, M, speeds, limits)
    if K > 1 and recipe not in ("auto", "v-half", "v-min"):
        works = layer_works(profile, True)
        least = max(least, least_in_order(profile, works, plain, followed_at_once(plain), speeds, limits))
    step = breakdown(profile, stages, timeline, mesh)
    assert least <= step.total, seed
    return least / step.total if step.total else 1.0


def test_no_plan_is_below_its_bound() -> None:
    near = [attack(seed) for seed in range(80)]
    assert max(near) > 0.99  # a bound of 0 would be below everything, too


@pytest.mark.slow
def test_no_plan_of_many_is_below_its_bound() -> None:
    for seed in range(80, 12_000):
        attack(seed)


def test_a_backward_in_halves_may_be_quicker_than_a_whole_one() -> None:
    # The bound took the whole backward for all: zb-v was left out for a reason that was false, and 1f1b took 216 ms.
    layer = profiles.layer(3 * MS, 0, 0, 0)
    profile = profiles.profile([replace(layer, backward=Seconds(2.4 * MS))] * 16)
    found = search(profile, [Device()] * 4, SearchOptions(microbatches=16, schedules=["1f1b", "zb-v"]), 16)
    assert found.best.recipe == "zb-v"
    assert found.best.step_seconds == pytest.approx(198 * MS, rel=0.01)
    assert not any(choice.recipe == "zb-v" for choice, _ in found.rejected)


def test_a_line_takes_time_to_fill_and_to_drain() -> None:
    bounds = Bounds(profiles.even(8, seconds=3 * MS))
    least = bounds.seconds("1f1b", 1, Mesh(1, 4), 8, [1.0] * 4)
    # No cuts of whole layers are at the bound: 1f1b itself takes 8 + 3 times 6 ms.
    assert 48 * MS < least < 66 * MS
    assert 48 * MS < bounds.seconds("zb-h1", 1, Mesh(1, 4), 8, [1.0] * 4) < least
    assert bounds.seconds("1f1b", 1, Mesh(1, 1), 8, [1.0]) == pytest.approx(192 * MS)


def test_devices_that_are_full_wait_for_the_first_backward() -> None:
    # Four layers on four devices, whose backwards take no time. In the 4 ms that a microbatch takes to go down, two of
    # them run 2, 2, 2 and 1 layers; and of many, that come as early as they can, 4, 3, 2 and 1, if there is the room.
    layer = replace(profiles.layer(0.0, 0, 1000, 0), forward=Seconds(MS), recompute=Seconds(MS))
    profile = replace(profiles.profile([layer] * 4), slack=0.0)

    def least(room: float, M: int = 2) -> float:
        return Bounds(profile).seconds("gpipe", 2, Mesh(1, 4), M, [1.0] * 4, Limits((room,) * 4, 1, 0.0))

    assert least(2000) == pytest.approx((8 + 16 - 7) / 4 * MS)
    schedule = make_schedule("gpipe", devices=4, microbatches=2)
    stages = make_stages(profile, (1, 1, 1, 1), schedule.placement, Mesh(1, 4), [1.0] * 4)
    timeline = simulate(schedule, stages.costs)
    assert max(held.total for held in footprints(profile, stages, timeline)) == 2000
    assert timeline.makespan == pytest.approx(5 * MS)
    assert least(8000, 8) == pytest.approx((32 + 16 - 10) / 4 * MS)
    assert least(2000, 8) == pytest.approx((32 + 16 - 8) / 4 * MS)
