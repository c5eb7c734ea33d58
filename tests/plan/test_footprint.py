"""Bytes per device: what is always there, what the schedule holds at its peak, what is on its way."""

from dataclasses import replace

import pytest

from gapless.plan.footprint import Footprint, footprints, in_flight_at_peak, over_limit
from gapless.plan.machine import Mesh
from gapless.plan.profile import Profile
from gapless.plan.stages import Stages, make_stages
from gapless.schedule import lower
from gapless.schedule.action import Schedule
from gapless.schedule.placement import vee
from gapless.schedule.recipes import make_schedule
from tests.plan import profiles

PROFILE = Profile("", tuple(profiles.layer(1e-3, 10, 100, 7) for _ in range(8)), input=5, reserved=1000)


def stages_for(schedule: Schedule, profile: Profile = PROFILE) -> Stages:
    K, S = schedule.num_devices, schedule.num_stages
    counts = [len(profile.layers) // S] * S
    return make_stages(profile, counts, schedule.placement, Mesh(1, K), [1.0] * K)


def held(schedule: Schedule, profile: Profile = PROFILE, **more: float) -> tuple[Footprint, ...]:
    return footprints(profile, stages_for(schedule, profile), schedule, **more)  # type: ignore[arg-type]


def test_each_part_of_1f1b_by_hand() -> None:
    # 2 layers per stage. Device r holds 4-r microbatches; a receive takes 1 buffer and 1 spare one, a send takes 1.
    found = held(make_schedule("1f1b", devices=4, microbatches=8), slack=0.5)
    assert [device.activations for device in found] == [800, 600, 400, 200]
    assert [device.buffers for device in found] == [21, 42, 42, 21]
    for device in found:
        assert (device.parameters, device.gradients, device.optimizer_state) == (20, 20, 40)
        assert (device.reserved, device.workspace) == (1000, 0)
        assert device.slack == pytest.approx(0.5 * (device.activations + device.buffers), abs=1)
        assert device.total == 1080 + device.activations + device.buffers + device.slack


def test_a_recompute_keeps_inputs_and_one_microbatch() -> None:
    plain = make_schedule("gpipe", devices=2, microbatches=6)
    again = lower.add_recompute(plain, early=False)
    assert [device.activations for device in held(plain)] == [6 * 400, 6 * 400]
    # Its input is 5 bytes on the first device and 7 on the second.
    assert [device.activations for device in held(again)] == [6 * 5 + 400, 6 * 7 + 400]


def test_what_weight_gradients_need_stays_longer() -> None:
    schedule = Schedule.parse("0: 0F0 0I0 0F1 0I1 0W0 0W1")
    profile = replace(PROFILE, layers=tuple(replace(layer, kept_for_weight_grad=30) for layer in PROFILE.layers))
    assert held(schedule, profile)[0].activations == 8 * (30 + 100)


def test_replicas_may_share_the_optimizer_s_state() -> None:
    schedule = make_schedule("1f1b", devices=4, microbatches=4)
    assert held(schedule, optimizer_shards=3)[0].optimizer_state == 14


def test_the_hungriest_layer_s_workspace_counts_once() -> None:
    layers = tuple(replace(layer, workspace=10 * number) for number, layer in enumerate(PROFILE.layers))
    found = held(make_schedule("1f1b", devices=4, microbatches=4), replace(PROFILE, layers=layers))
    assert [device.workspace for device in found] == [10, 30, 50, 70]


def test_a_vee_has_no_message_where_it_turns() -> None:
    schedule = make_schedule("zb-v", devices=2, microbatches=4)
    assert schedule.placement == vee(2)
    # Four channels between the two devices, one of each kind each way: 2 x (2 receives + 1 send) x 7 bytes.
    assert [device.buffers for device in held(schedule)] == [42, 42]


def test_how_often_a_stage_is_there_at_the_peak() -> None:
    schedule = make_schedule("1f1b", devices=4, microbatches=8)
    assert in_flight_at_peak(schedule, stages_for(schedule)) == (4, 3, 2, 1)
    vee_ = make_schedule("zb-v", devices=2, microbatches=6)
    times, stages = in_flight_at_peak(vee_, stages_for(vee_)), stages_for(vee_)
    for device, own in enumerate(vee_.placement.stages):
        assert 200 * sum(times[stage] for stage in own) == footprints(PROFILE, stages, vee_)[device].activations


def test_the_fullest_device_comes_first() -> None:
    found = held(make_schedule("1f1b", devices=4, microbatches=8))
    limits = [found[0].total - 1, found[1].total - 9, found[2].total, None]
    assert over_limit(found, limits) == [1, 0]
