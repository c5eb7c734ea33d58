"""The search: what it finds fits, is the quickest of what was tried, and is told with its reasons."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from gapless.errors import ConfigError, PlanError
from gapless.plan.cut.partition import equal_counts
from gapless.plan.cut.stage_costs import make_stages
from gapless.plan.plan import Plan
from gapless.plan.predict.footprint import footprints
from gapless.plan.profile.contention import Contention
from gapless.plan.profile.machine import Device, Mesh
from gapless.plan.profile.profile import Layer, Link, Profile, Seconds
from gapless.plan.search.choices import Choice, machines, meshes, microbatches
from gapless.plan.search.drafts import Drafts
from gapless.plan.search.finish import finished
from gapless.plan.search.judge import Judge
from gapless.plan.search.search import Found, search
from gapless.plan.search.search_options import SearchOptions
from gapless.schedule.recipes import make_schedule
from gapless.schedule.simulate import simulate
from gapless.schedule.verify import verify
from tests.plan import profiles

MIB = 2**20
FEW = ("1f1b", "zb-h1", "interleaved", "zb-v")
UNEVEN = replace(
    profiles.profile(
        [
            profiles.layer(0.5e-3, 8 * MIB, MIB, MIB, "embedding"),
            *(profiles.layer(3e-3, 2 * MIB, 4 * MIB, MIB, f"block {number}") for number in range(6)),
            profiles.layer(7e-3, 8 * MIB, 12 * MIB, 4, "head"),
        ],
        [Link("link", None, 2e-5, 1e10)],
    ),
    input=1000,
)


def searched(
    profile: Profile,
    devices: int | list[Device],
    *,
    memory: int | None = None,
    minibatch: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
    **wanted: Any,
) -> Found:
    there = [Device(memory)] * devices if isinstance(devices, int) and memory is not None else devices
    return search(
        profile, there, SearchOptions(**{"replicas": True, "time_limit": None, **wanted}), minibatch, progress
    )


@cache
def plan_of(memory: float | None = None, devices: int = 4, profile: Profile = UNEVEN, **more: Any) -> Found:
    options = {"minibatch": 16, "schedules": FEW, **more}
    return searched(profile, devices, memory=None if memory is None else int(memory * MIB), **options)


def test_an_optimizer_step_that_does_not_wait_holds_parameters_and_state_twice() -> None:
    plain, doubled = (plan_of(schedules=("1f1b",), replicas=False, overlap=overlap).best for overlap in (False, True))
    for one, other in zip(plain.memory, doubled.memory, strict=True):
        assert other.total - one.total == one.parameters + one.optimizer_state
    with pytest.raises(ConfigError, match="a step on state in host memory can't be undone"):
        SearchOptions(offload="both", overlap=True)


@pytest.mark.parametrize("memory", [75, *(pytest.param(each, marks=pytest.mark.slow) for each in (None, 140, 90))])
def test_every_plan_fits_can_run_and_says_what_it_holds(memory: int | None) -> None:
    found = plan_of(memory)
    steps = [plan.step_seconds for plan in found.plans]
    assert steps == sorted(steps)
    for plan in found.plans:
        verify(plan.schedule, plan.microbatches, len(plan.partition)).raise_if_wrong()
        assert sum(plan.partition) == 8
        assert plan.minibatch == 16
        assert plan.breakdown.total == pytest.approx(plan.step_seconds)
        scaled = UNEVEN.scaled(plan.samples)
        speeds = [1.0] * plan.num_devices
        stages = make_stages(scaled, plan.partition, plan.schedule.placement, plan.mesh, speeds, plan.remat)
        assert plan.memory == footprints(scaled, stages, simulate(plan.schedule, stages.costs))
        assert {stage for stage, _ in plan.schedule.recomputed} == {
            stage for stage, kind in enumerate(plan.remat) if kind == "stage"
        }
        if memory is not None:
            assert max(held.total for held in plan.memory) <= memory * MIB
    if memory == 75:
        assert any("stage" in plan.remat for plan in found.plans)


@pytest.mark.slow
def test_the_answer_does_not_depend_on_chance() -> None:
    one, two = (plan_of.__wrapped__(100, devices=2) for _ in range(2))
    assert one == two


def test_the_best_is_never_slower_than_counting_layers() -> None:
    chance = random.Random(5)
    for _ in range(4):
        profile = profiles.some(chance, 9, [Link("link", None, 0.1, 1e9)])
        for recipe in ("1f1b", "zb-v"):
            best = searched(profile, 2, minibatch=6, microbatches=6, schedules=[recipe]).best
            if best.num_devices == 1:
                continue
            schedule = make_schedule(recipe, devices=2, microbatches=6)
            counts = equal_counts(9, schedule.num_stages)
            stages = make_stages(profile, counts, schedule.placement, Mesh(1, 2), [1.0, 1.0])
            assert best.step_seconds <= float(simulate(schedule, stages.costs).makespan) * (1 + 1e-9)


def test_two_stages_of_one_device_are_balanced_together() -> None:
    # A heavy head shares its device with the first stage of a vee: only the simulation sees that.
    layers = [profiles.layer(1e-3, 0, 0, 0) for _ in range(15)] + [profiles.layer(9e-3, 0, 0, 0)]
    best = searched(profiles.profile(layers), 2, minibatch=8, microbatches=8, schedules=["zb-v"]).plans
    plan = next(plan for plan in best if plan.num_devices == 2)
    assert plan.partition[0] == 3
    assert plan.breakdown.imbalance == pytest.approx(0)


def test_auto_is_tried_where_the_others_do_best() -> None:
    found = searched(profiles.even(8), 2, minibatch=8, memory=200 * MIB)
    assert any(plan.recipe == "auto" for plan in found.plans)
    quickest = min(plan.step_seconds for plan in found.plans if plan.recipe != "auto")
    assert found.best.step_seconds <= quickest * (1 + 1e-9)


def test_slow_devices_get_fewer_layers_and_small_ones_too() -> None:
    devices = [Device(), Device(speed=0.5), Device()]
    best = searched(profiles.even(10), devices, minibatch=12, microbatches=12, schedules=["1f1b"], replicas=False).best
    assert sorted(best.partition) == [2, 4, 4]
    assert best.mesh.device(0, best.partition.index(2)) == 1
    small = [Device(400 * MIB), Device(18 * MIB)]
    best = searched(profiles.even(10), small, minibatch=8, microbatches=8, schedules=["1f1b"]).best
    assert best.num_devices == 2
    assert all(held.total <= (limit or 0) for held, limit in zip(best.memory, best.limits, strict=True))


def test_a_large_model_uses_replicas_only_where_it_fits() -> None:
    profile = profiles.even(8, [Link("link", None, 0.0, 1e12)], seconds=3e-3, parameters=MIB, activation=MIB)
    assert searched(profile, 4, minibatch=16, schedules=FEW).best.mesh.replicas == 4
    # A whole copy holds 8 x 4 MiB and more.
    tight = searched(profile, 4, minibatch=16, schedules=FEW, memory=22 * MIB).best
    assert tight.mesh.replicas < 4


def test_the_explanation_is_two_sentences() -> None:
    found = plan_of(140)
    first, second = found.explanation.split(". Its fullest device")
    assert first.startswith(found.best.title)
    assert "the next kind, " in first
    assert f"holds {found.best.memory[0].total / MIB:.4g} MiB" in second or "of 140 MiB" in second
    assert second.endswith("rejected.")


def test_each_rejected_choice_has_its_reason() -> None:
    found = plan_of(75)
    assert found.rejected
    for choice, reason in found.rejected:
        assert str(choice).startswith(choice.recipe)
        assert "MiB" in reason or reason.startswith(
            ("too large even with microbatches of", "it takes at least", "it fits only")
        )


def test_what_can_t_fit_says_what_would() -> None:
    with pytest.raises(PlanError) as caught:
        plan_of(33, schedules=("zb-v",))
    said = str(caught.value)
    assert said.startswith("nothing fits 33 MiB per device; the nearest is ")
    enough = float(said.rsplit("about ", 1)[1].split(" MiB")[0])
    assert plan_of(enough * 1.01, schedules=("zb-v",)).plans
    assert "parameters" in said


def test_a_layer_larger_than_a_device_is_said_first() -> None:
    with pytest.raises(PlanError) as caught:
        plan_of(20)
    assert str(caught.value) == (
        "layer 0 (embedding) alone needs 32 MiB for its parameters (8 MiB), gradients and optimizer state, but the "
        "largest device has 20 MiB: cut it into smaller layers, or use devices of at least 32 MiB"
    )


def test_more_devices_than_layers_leave_some_idle() -> None:
    unlike = [Device(10**9), Device(10**9), Device(10**9), Device(10**9 + 1)]
    best = searched(profiles.even(3), unlike, minibatch=4, replicas=False).best
    assert (best.num_devices, best.idle_devices) == (3, 1)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"devices": 0}, "devices is 0, but a plan needs at least 1"),
        ({"minibatch": 0}, "minibatch is 0, but a plan needs at least 1"),
        ({"microbatches": 99}, "a minibatch of 16 samples can't be cut into 99 microbatches: use fewer"),
        ({"schedules": ("zbv",)}, "there is no schedule named 'zbv'; did you mean zb-v?"),
        ({"schedules": ("pipedream",)}, "the planner can't use pipedream, since it has no flush; use 1f1b, "),
    ],
)
def test_what_makes_no_sense_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=f"^{message.replace('?', '[?]')}"):
        plan_of(**more)


def test_a_time_limit_ends_the_search_with_what_there_is() -> None:
    found = plan_of(time_limit=0)
    assert not found.complete
    assert len(found.plans) == 1
    assert found.searched.cut_short
    late = [reason for _, reason in found.rejected if reason == "not tried: the time limit of 0 s was over"]
    assert len(late) == found.searched.untried > 0


def test_a_time_limit_that_ends_the_last_moves_of_the_cuts_is_told() -> None:
    # One choice, of which there are too many cuts to try all.
    more: dict[str, Any] = {"mesh": Mesh(1, 4), "microbatches": 4, "schedules": ["1f1b"], "minibatch": 4}
    assert searched(profiles.even(30), 4, time_limit=0, **more).searched.cut_short
    assert not searched(profiles.even(30), 4, **more).searched.cut_short


def test_a_time_limit_ends_a_search_that_finds_nothing() -> None:
    with pytest.raises(
        PlanError, match=r"^nothing fits 33 MiB per device \(cut short by the time limit of 0 s\); the "
    ):
        plan_of(33, time_limit=0, schedules=("1f1b",))


def test_devices_that_are_too_small_together_say_what_would_do() -> None:
    # 4 layers need 64 MiB and a little: half of it on each of two devices.
    profile = profiles.even(4, parameters=4 * MIB, activation=1000, boundary=1000)
    meshes_asked: tuple[dict[str, Any], ...] = ({}, {"mesh": Mesh(1, 2)})
    for more in meshes_asked:
        with pytest.raises(
            PlanError, match=r"^nothing fits 20 MiB per device; .*: about 32(\.\d+)? MiB per device would"
        ):
            searched(profile, 2, memory=20 * MIB, minibatch=8, **more)


def test_cuts_are_chosen_with_the_sums_of_gradients_and_the_update() -> None:
    def layer(seconds: float, heavy: bool) -> Layer:
        size = 100 * MIB if heavy else MIB
        return replace(profiles.layer(seconds, size, 1, 1), update=Seconds(size / MIB * 3e-4))

    for seed in range(3):
        chance = random.Random(seed)
        layers = [layer(chance.choice((3e-3, 6e-3, 9e-3)), chance.random() < 0.3) for _ in range(8)]
        profile = profiles.profile(layers, [Link("link", None, 0.0, 1e9)])
        mesh, choice = Mesh(2, 3), Choice("1f1b", 1, Mesh(2, 3), 2, 1)
        found = searched(profile, 6, minibatch=4, microbatches=2, schedules=["1f1b"], mesh=mesh)
        judge = Judge(Drafts(profile, [Device()] * 6))
        every = [(a, b - a, 8 - b) for a, b in combinations(range(1, 8), 2)]
        best = min(finished(judge.drafts, judge.drafts.make(choice, counts)).step_seconds for counts in every)
        assert found.best.step_seconds == pytest.approx(best)


def test_replicas_on_shared_processors_are_no_faster_than_these() -> None:
    profile = replace(profiles.even(8, seconds=3e-3), contention=Contention(at_once=2.0))
    plans = searched(profile, 4, minibatch=16, schedules=["1f1b"], microbatches=4, mesh=Mesh(4, 1)).plans
    assert plans[0].step_seconds == pytest.approx(16 * 8 * 3e-3 / 2)


def test_many_unlike_devices_may_leave_any_of_the_slowest_idle() -> None:
    devices = [Device(speed=0.01), *(Device(speed=1 + number / 100) for number in range(13))]
    assert tuple(range(1, 14)) in machines(devices)
    found = searched(profiles.even(14), devices, minibatch=4, microbatches=4, schedules=["1f1b"], replicas=False)
    assert 0 not in found.best.mesh.order
    # All of them busy all the time: what no choice of devices can be below.
    least = 4 * 14e-3 / sum(device.speed for device in devices)
    assert found.best.step_seconds * (1 - found.searched.gap) <= least


def test_links_that_do_not_reach_are_refused() -> None:
    with pytest.raises(ConfigError, match="the links of the profile reach 2 devices, but there are 4: add the link"):
        plan_of(profile=replace(UNEVEN, links=(Link("inside", 2),)))


def test_schedules_that_would_take_too_long_are_left_out() -> None:
    with pytest.raises(PlanError, match=r"it has about [\d,]+ actions, and more than 2,000,000 take too long"):
        searched(profiles.even(4), 2, minibatch=2**20, microbatches=2**20, schedules=["1f1b"], replicas=False)


def test_progress_is_told() -> None:
    seen: list[str] = []
    plan_of(progress=seen.append, schedules=("1f1b",))
    assert re.fullmatch(r"0/\d+ choices, nothing fits yet", seen[0])
    assert re.fullmatch(r"\d+/\d+ choices, best [\d.]+ ms", seen[-1])


def test_a_plan_is_written_and_read_back_as_it_was(tmp_path: Path) -> None:
    for plan in plan_of(75).plans[:4]:
        plan.write(tmp_path / "plan.json")
        again = Plan.read(tmp_path / "plan.json")
        assert again == plan
        assert again.schedule.name == plan.recipe
        assert again.timeline.makespan == plan.timeline.makespan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "this is not a plan: it has no 'recipe'"),
        ("[", "Expecting value"),
        ("3", "this is not a plan: "),
    ],
)
def test_a_file_that_is_no_plan_is_said(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        Plan.read(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("searched", "order", "message"),
    [
        ({"gap": "small"}, [0, 1], "this is not a plan: what it says under searched is "),
        ({"devices": None}, [0, 1], "this is not a plan: what it says under searched is "),
        ({"devices": 4}, [0, 4], "this is not a plan: its order has device 4, but it was made for 4 devices"),
    ],
)
def test_a_plan_with_another_account_of_its_search_is_refused(
    searched: dict[str, Any], order: list[int], message: str
) -> None:
    data = plan_of(devices=2, schedules=("1f1b",), microbatches=2, mesh=Mesh(1, 2)).best.to_json()
    with pytest.raises(ConfigError, match=message):
        Plan.from_json(data | {"order": order, "searched": data["searched"] | searched})


def test_a_plan_whose_parts_do_not_belong_together_is_refused() -> None:
    plan = next(plan for plan in plan_of(75).plans if len(plan.partition) > 1)
    with pytest.raises(ConfigError, match="but the plan has a partition of 1, "):
        replace(plan, partition=(8,))


def test_meshes_and_microbatches() -> None:
    alike = [Device()] * 4
    assert meshes(range(4), alike, replicas=True, links=()) == [Mesh(1, 4), Mesh(2, 2), Mesh(4, 1)]
    near = (Link("inside", 2), Link("outside"))
    assert Mesh(2, 2, inside=True) in meshes(range(4), alike, replicas=True, links=near)
    assert meshes(range(4), alike, replicas=False, links=()) == [Mesh(1, 4)]
    assert microbatches(Mesh(1, 4), 128) == [(128, 1), (64, 2), (32, 4), (16, 8), (8, 16), (4, 32), (2, 64), (1, 128)]
    assert microbatches(Mesh(3, 4), 8) == [(3, 1), (2, 2), (1, 3)]
    assert microbatches(Mesh(9, 1), 8) == []
    assert microbatches(Mesh(2, 4), 64, 5) == [(5, 7)]


def test_unlike_devices_are_put_in_every_order_and_may_stay_idle() -> None:
    unlike = [Device(10), Device(24), Device(24)]
    assert machines(unlike) == [(0, 1, 2), (0, 1), (1, 2), (0,), (1,)]
    assert [mesh.order for mesh in meshes((0, 1, 2), unlike, replicas=False, links=())] == [(), (1, 0, 2), (1, 2, 0)]
    # The two alike are the replicas of a stage.
    four = [Device(10), Device(24), Device(10), Device(24)]
    orders = {mesh.order for mesh in meshes(range(4), four, replicas=True, links=()) if mesh.replicas == 2}
    assert {(), (1, 0, 3, 2)} <= orders


def test_the_order_of_a_vee_does_not_depend_on_what_was_drafted_before() -> None:
    profile = profiles.some(random.Random(3), 12, [Link("link", None, 0.1, 1e9)])
    choice, counts = Choice("v-half", 2, Mesh(1, 3), 6, 1), (2, 2, 2, 2, 2, 2)
    fresh, used = (Drafts(profile, [Device()] * 3) for _ in range(2))
    inside = used.make(choice, counts, ("layer",) * 6)
    assert inside.plain != fresh.make(choice, counts).plain == used.make(choice, counts).plain
