"""Plans that use the host's memory: they fit, they run, and more of anything never makes them slower."""

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gapless
from gapless.errors import ConfigError, PlanError
from gapless.plan.plan import Plan
from gapless.plan.planner import planned
from gapless.plan.profile.machine import Device, Mesh
from gapless.plan.profile.profile import Host, Link, Profile
from gapless.plan.search.search import Found, search
from gapless.plan.search.search_options import SearchOptions
from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.recipes import make_schedule
from gapless.schedule.simulate import simulate
from gapless.schedule.verify import verify
from tests.pipelines import assert_same_gradients
from tests.plan import profiles

MIB = 2**20


def found_for(profile: Profile, devices: list[Device], recipes: list[str], M: int, **more: Any) -> Found | None:
    wanted = SearchOptions(**{"offload": "activations", "time_limit": None, **more}, microbatches=M, schedules=recipes)
    try:
        return search(profile, devices, wanted, M)
    except PlanError:
        return None


def check(plan: Plan, profile: Profile) -> None:
    """It can run, nobody waits for a copy, and it is within all limits as simulated."""
    verify(plan.schedule).raise_if_wrong()
    timeline = simulate(plan.schedule, replace(plan.costs, kept_for_weight_grad=None))
    plain = [[action for action in row if action.kind not in "OL"] for row in plan.schedule.rows]
    assert timeline.makespan <= simulate(Schedule.of(plain), plan.costs).makespan * (1 + 1e-9), "somebody waits"
    for device, (held, limit) in enumerate(zip(plan.memory, plan.limits, strict=True)):
        assert limit is not None
        fixed = held.parameters + held.gradients + held.optimizer_state
        assert fixed + timeline.peak[device] <= held.total <= limit
        assert profile.host is not None
        assert profile.host.memory is None or timeline.host_peak[device] <= profile.host.memory


# -- more is never slower ---------------------------------------------------------------------------------------------


def never_slower(seed: int) -> bool:
    """With more memory of device or host, exactly; with more bandwidth within what is printed, as with all speeds. True
    where something was offloaded.
    """
    chance = random.Random(seed)
    layers = [
        profiles.layer(
            chance.choice((1.0, 2.0, 3.0, 5.0)), chance.choice((0, 1, 4)) * MIB, chance.choice((9, 40)) * MIB
        )
        for _ in range(chance.randint(4, 6))
    ]
    layers = [replace(each, boundary=chance.choice((0, MIB, 4 * MIB))) for each in layers]
    plain = profiles.profile(layers, [Link("link", None, chance.choice((0.0, 0.2)), 50.0 * MIB)])
    K, M, recipe = 4, chance.choice((4, 8)), chance.choice(("1f1b", "1f1b", "gpipe", "interleaved"))
    work, size = sum(each.work for each in layers), sum(each.activation for each in layers)
    host = Host(size / work * chance.choice((2, 4, 16)), 0.0, chance.choice((size, 4 * size)))
    memory = int(chance.uniform(2.2, 5) * size / K + 4 * sum(each.parameters for each in layers) / K)
    larger, more = host, memory
    if seed % 3 == 0:
        larger = replace(host, bandwidth=(host.bandwidth or 0) * chance.choice((1.1, 1.5, 8)))
    elif seed % 3 == 1:
        larger = replace(host, memory=int((host.memory or 0) * chance.choice((1.1, 1.5, 4))))
    else:
        more += chance.choice((1, 5 * MIB, 40 * MIB))
    plans, gap = [], 0.0
    for each, room in ((None, memory), (host, memory), (larger, more)):
        profile = replace(plain, host=each)
        found = found_for(profile, [Device(room)] * K, [recipe], M, offload="activations" if each else "none")
        plans.append(None if found is None else found.best)
        gap = 0.0 if found is None or larger.bandwidth == host.bandwidth else found.searched.gap
        if plans[-1] is not None and each is not None:
            check(plans[-1], profile)
    steps = [float("inf") if plan is None else plan.step_seconds for plan in plans]
    assert steps[1] <= steps[0] * (1 + 1e-9), (seed, "offload", steps)
    assert steps[2] * (1 - gap) <= steps[1] * (1 + 1e-9), (seed, "more", steps)
    return any(plan is not None and plan.schedule.has_copies for plan in plans)


def test_more_of_anything_is_never_slower() -> None:
    assert sum(map(never_slower, (0, 1, 2, 6, 8, 19, 23))) >= 6


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_more_of_anything_is_never_slower_in_600_pairs() -> None:
    assert sum(map(never_slower, range(100, 700))) >= 100


# -- against every plan there is --------------------------------------------------------------------------------------


def with_copies(row: tuple[Action, ...]) -> Iterator[list[Action]]:
    """A row with every choice of what leaves, right behind its F, and of when it comes back."""
    stays = []
    for place, action in enumerate(row):
        if action.kind is Kind.FORWARD:
            back = next(n for n, a in enumerate(row) if n > place and a[::2] == action[::2])
            stays.append([None, *range(place + 1, back + 1)] if back > place + 1 else [None])
    forwards = [action for action in row if action.kind is Kind.FORWARD]
    for chosen in product(*stays):
        before: dict[int, list[Action]] = {}
        for action, until in zip(forwards, chosen, strict=True):
            if until is not None:
                before.setdefault(until, []).append(action._replace(kind=Kind.LOAD))
        away = {action[::2] for action, until in zip(forwards, chosen, strict=True) if until is not None}
        made: list[Action] = []
        for place, action in enumerate(row):
            made += (*before.get(place, ()), action)
            if action.kind is Kind.FORWARD and action[::2] in away:
                made.append(action._replace(kind=Kind.OFFLOAD))
        yield made


def _recomputed(row: tuple[Action, ...]) -> tuple[Action, ...]:
    pairs = ((a._replace(kind=Kind.RECOMPUTE), a) if a.kind is Kind.INPUT_GRAD else (a,) for a in row)
    return tuple(action for pair in pairs for action in pair)


def best_of_all(profile: Profile, memory: int, recipe: str, K: int, M: int) -> float:
    """The shortest step of any cuts, recomputes and copies, whether or not somebody waits for one."""
    assert profile.host is not None
    best = float("inf")
    plain = make_schedule(recipe, devices=K, microbatches=M)
    for cuts in combinations(range(1, len(profile.layers)), K - 1):
        parts = [profile.layers[a:b] for a, b in pairwise((0, *cuts, len(profile.layers)))]
        for remat in product((False, True), repeat=K):
            rows = [_recomputed(row) if again else row for row, again in zip(plain.rows, remat, strict=True)]
            times = [sum(layer.forward.median for layer in part) for part in parts]
            sizes = [sum(layer.activation for layer in part) for part in parts]
            fixed = [sum(layer.kept() for layer in part) for part in parts]
            costs = Costs(
                times, times, times, times, activation=sizes, boundary=0, host_bandwidth=profile.host.bandwidth
            )
            for made in product(*(with_copies(row) if not remat[d] else [row] for d, row in enumerate(rows))):
                timeline = simulate(Schedule.of(made), costs)
                fits = all(size + peak <= memory for size, peak in zip(fixed, timeline.peak, strict=True))
                best = min(best, float(timeline.makespan)) if fits else best
    return best


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(each, marks=pytest.mark.slow) for each in range(3, 60))])
def test_no_plan_of_a_small_model_is_faster_than_the_printed_gap_allows(seed: int) -> None:
    chance = random.Random(seed)
    layers = [
        profiles.layer(3.0 * chance.randint(1, 3), chance.randint(0, 1), chance.randint(4, 9), 0) for _ in range(3)
    ]
    size = sum(layer.activation for layer in layers)
    profile = replace(profiles.profile(layers), slack=0.0, host=Host(chance.choice((1, 2, 8)) * size / 18))
    memory, recipe = round(chance.uniform(1.0, 2.5) * size) + 8, chance.choice(("1f1b", "gpipe"))
    M = 2 if recipe == "gpipe" else 4
    best = best_of_all(profile, memory, recipe, 2, M)
    wanted = SearchOptions(schedules=[recipe], microbatches=M, mesh=Mesh(1, 2), offload="activations", time_limit=None)
    try:
        found = search(profile, [Device(memory)] * 2, wanted, M)
    except PlanError:
        return
    check(found.best, profile)
    assert best >= found.best.step_seconds * (1 - found.searched.gap) * (1 - 1e-9)


# -- what is chosen ---------------------------------------------------------------------------------------------------

EVEN = profiles.even(8, seconds=30e-3, parameters=16 * MIB, activation=100 * MIB, boundary=4 * MIB)


@pytest.mark.parametrize("recipe", ["1f1b", "interleaved"])
def test_a_quick_link_takes_the_place_of_recomputes(recipe: str) -> None:
    room = 480 if recipe == "interleaved" else 700
    machine = [Device(room * MIB)] * 4
    steps = []
    for bandwidth in (None, 1e9, 16e9):
        profile = replace(EVEN, host=None if bandwidth is None else Host(bandwidth))
        found = found_for(profile, machine, [recipe], 16, offload="activations" if bandwidth else "none")
        assert found is not None
        steps.append(found.best.step_seconds)
    assert steps[0] == steps[1] > 1.04 * steps[2]
    assert found is not None
    assert "offload" in found.best.title
    assert "in its host's memory" in str(found.best)
    assert set(found.best.offload) == {"none", "activations"}
    assert set(found.best.remat) == {"none"}
    assert Plan.from_json(found.best.to_json()) == found.best


def test_an_optimizer_on_the_host_leaves_room_and_takes_the_time_of_its_copies() -> None:
    large = profiles.even(8, seconds=30e-3, parameters=512 * MIB, activation=100 * MIB, boundary=4 * MIB)
    profile = replace(large, host=Host(32 * 2**30))
    usual, away = (found_for(profile, [Device()] * 4, ["1f1b"], 8, offload=word) for word in ("none", "optimizer"))
    assert usual is not None
    assert away is not None
    state = usual.best.memory[0].optimizer_state
    assert (state, away.best.memory[0].optimizer_state) == (2 * 2 * 512 * MIB, 0)
    assert away.best.breakdown.update == pytest.approx(state / 2**30 / 32)
    small = found_for(profile, [Device(4480 * MIB)] * 4, ["1f1b"], 8, offload="optimizer", remat=())
    assert small is not None  # parameters, gradients and activations: the update needs no more, in pieces
    assert away.best.title.endswith("optimizer offloaded")
    assert Plan.from_json(away.best.to_json()).offload_optimizer


def test_a_link_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="how fast the link to the host is"):
        search(EVEN, 2, SearchOptions(offload="activations"))
    with pytest.raises(ConfigError, match="for a plan it must be one of none, activations, optimizer, both"):
        SearchOptions(offload="all")  # type: ignore[arg-type]


def test_a_plan_that_offloads_runs_with_the_bits_of_a_plain_loop() -> None:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)]
    model, x, y = nn.Sequential(*layers), torch.randn(1024, 64), torch.randn(1024, 64)
    twin = copy.deepcopy(model)
    more: dict[str, Any] = {"flops": 1e9, "host_bandwidth": "100GB/s", "microbatches": 8, "schedules": ["1f1b"]}
    more |= {"devices": 4, "loss": F.mse_loss, "optimizer": None}
    usual = gapless.make_plan(model, x, y, **more)
    room = max(held.total for held in usual.memory) * 4 // 5
    plan = gapless.make_plan(model, x, y, memory=room, offload="activations", **more)
    assert plan.schedule.has_copies
    assert plan.step_seconds == usual.step_seconds
    with gapless.Pipeline(model, devices=4, schedule=plan, loss=F.mse_loss) as pipe:
        assert pipe.schedule.offloaded == plan.schedule.offloaded
        pipe.step(x, y)
        pipe.step(x[:4], y[:4])  # 4 microbatches: the stages of the plan may offload there, too
    for count, size in ((8, 128), (4, 1)):
        for one, two in zip(x[: count * size].split(size), y[: count * size].split(size), strict=True):
            (F.mse_loss(twin(one), two) / count).backward()
    assert_same_gradients(model, twin)


def test_a_link_is_measured_where_none_is_given() -> None:
    layers, x = [nn.Linear(8, 8) for _ in range(4)], torch.randn(8, 8)
    with pytest.raises(ConfigError, match="give host_bandwidth= too"):
        gapless.make_plan(layers, x, devices=2, offload="activations", flops=1e9)
    wanted = SearchOptions(schedules=["1f1b"], offload="activations")
    host = planned(layers, x, devices=2, wanted=wanted, seconds=0.01).profile.host
    assert host is not None
    assert host.bandwidth is not None
    assert 1e7 < host.bandwidth < 1e13
