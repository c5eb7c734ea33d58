"""Bytes per device: what is always there, what the schedule holds at its peak, what is on its way."""

from dataclasses import replace

import pytest

from gapless.plan.cut.stage_costs import Stages, make_stages
from gapless.plan.predict.footprint import Footprint, footprints, over_limit
from gapless.plan.profile.machine import Mesh
from gapless.plan.profile.profile import Profile
from gapless.plan.search.recomputes import in_flight_at_peak
from gapless.schedule import lower
from gapless.schedule.action import Schedule
from gapless.schedule.placement import vee
from gapless.schedule.recipes import make_schedule
from gapless.schedule.simulate import simulate
from tests.plan import profiles

PROFILE = Profile("", tuple(profiles.layer(1e-3, 10, 100, 7) for _ in range(8)), input=5, reserved=1000)


def stages_for(schedule: Schedule, profile: Profile = PROFILE) -> Stages:
    K, S = schedule.num_devices, schedule.num_stages
    counts = [len(profile.layers) // S] * S
    return make_stages(profile, counts, schedule.placement, Mesh(1, K), [1.0] * K)


def held(schedule: Schedule, profile: Profile = PROFILE, **more: float) -> tuple[Footprint, ...]:
    stages = stages_for(schedule, profile)
    return footprints(profile, stages, simulate(schedule, stages.costs), **more)  # type: ignore[arg-type]


def test_each_part_of_1f1b_by_hand() -> None:
    # 2 layers per stage. Device r holds 4-r microbatches; what it sent last, to one side or the other, may wait there.
    found = held(make_schedule("1f1b", devices=4, microbatches=8), slack=0.5)
    assert [device.activations for device in found] == [800, 600, 400, 200]
    assert [device.buffers for device in found] == [7, 7, 7, 7]
    for device in found:
        assert (device.parameters, device.gradients, device.optimizer_state) == (20, 20, 40)
        assert (device.reserved, device.workspace) == (1000, 0)
        assert device.slack == pytest.approx(0.5 * (device.activations + device.buffers), abs=1)
        assert device.total == 1080 + device.activations + device.buffers + device.slack


def test_a_recompute_keeps_inputs_and_one_microbatch() -> None:
    plain = make_schedule("gpipe", devices=2, microbatches=6)
    again = lower.add_recompute(plain, early=False)
    assert [device.activations for device in held(plain)] == [6 * 400, 6 * 400]
    # Its input is 5 bytes on the first device and 7 on the second, and one of the six is among the 400 that are back.
    assert [device.activations for device in held(again)] == [5 * 5 + 400, 5 * 7 + 400]


def test_a_forward_that_is_recomputed_makes_it_all_the_first_time_too() -> None:
    (found,) = held(Schedule.parse("0: 0F0 0F1 0R0 0F2 0B0 0R1 0B1 0R2 0B2"))
    # While 0F2 runs there are three inputs, what 0R0 has brought back, and as much again.
    assert found.activations == 5 + 2 * 800


def test_what_weight_gradients_need_stays_longer() -> None:
    schedule = Schedule.parse("0: 0F0 0I0 0F1 0I1 0W0 0W1")
    profile = replace(PROFILE, layers=tuple(replace(layer, kept_for_weight_grad=30) for layer in PROFILE.layers))
    assert held(schedule, profile)[0].activations == 8 * (30 + 100)


def test_weight_gradients_may_need_more_than_forwards_leave() -> None:
    # A linear layer: F leaves its input, W needs the gradient of its output too.
    schedule = Schedule.parse("0: 0F0 0I0 0F1 0I1 0W0 0W1")
    profile = replace(PROFILE, layers=tuple(replace(layer, kept_for_weight_grad=170) for layer in PROFILE.layers))
    assert held(schedule, profile)[0].activations == 8 * (170 + 170)


def test_replicas_may_share_the_optimizer_s_state() -> None:
    schedule = make_schedule("1f1b", devices=4, microbatches=4)
    assert held(schedule, optimizer_shards=3)[0].optimizer_state == 14


def test_the_hungriest_layer_s_workspace_counts_once() -> None:
    layers = tuple(replace(layer, workspace=10 * number) for number, layer in enumerate(PROFILE.layers))
    found = held(make_schedule("1f1b", devices=4, microbatches=4), replace(PROFILE, layers=layers))
    assert [device.workspace for device in found] == [10, 30, 50, 70]


def test_what_an_early_layer_takes_counts_where_later_ones_hold_less() -> None:
    layers = [replace(layer, workspace=10, halves_workspace=10) for layer in PROFILE.layers]
    layers[0] = replace(layers[0], workspace=1000, halves_workspace=1000)
    profile = replace(PROFILE, layers=tuple(layers))
    # Seven layers of 100 bytes hold nothing yet, or nothing any more, while layer 0 runs.
    assert held(Schedule.parse("0: 0F0 0B0"), profile)[0].workspace == 1000 - 7 * 100
    # In halves, all of it waits for W.
    assert held(Schedule.parse("0: 0F0 0I0 0W0"), profile)[0].workspace == 1000


def test_an_input_that_waits_for_its_w_and_that_the_layer_before_holds_is_there_once() -> None:
    """A tanh holds its result, which a linear layer behind it needs for its W: a u-net was planned 15% too large."""
    tanh = replace(PROFILE.layers[0], kept_for_weight_grad=0, halves_workspace=50)
    linear = replace(PROFILE.layers[0], overlap=90, kept_for_weight_grad=160, kept_input=90)
    profile = replace(PROFILE, layers=(tanh, linear))
    # Forwards leave 110 bytes. While the tanh's I runs the other 10 are gone, and the gradient that W needs is there.
    assert held(Schedule.parse("0: 0F0 0I0 0W0"), profile)[0].workspace == 50 - 10 + (160 - 90)
    apart = replace(profile, layers=(tanh, replace(linear, kept_input=0)))
    assert held(Schedule.parse("0: 0F0 0I0 0W0"), apart)[0].workspace == 50 - 10 + 160


def test_each_kind_of_action_takes_its_own() -> None:
    layer = replace(PROFILE.layers[0], kept_for_weight_grad=40, workspace=1, halves_workspace=20, weight_workspace=3)
    layer = replace(layer, forward_workspace=400)
    assert layer.most_workspace == 400
    profile = replace(PROFILE, layers=(layer,))

    def most(text: str) -> tuple[int, int]:
        (found,) = held(Schedule.parse(text), profile)
        return found.activations, found.workspace

    assert most("0: 0F0 0I0 0W0") == (100, 400)
    assert most("0: 0F0 0F1 0B0 0B1") == (200, 400)
    profile = replace(PROFILE, layers=(replace(layer, forward_workspace=0),))
    assert most("0: 0F0 0B0") == (100, 1)
    assert most("0: 0F0 0I0 0W0") == (100, 20)
    profile = replace(PROFILE, layers=(replace(layer, forward_workspace=0, weight_workspace=90),))
    assert most("0: 0F0 0I0 0W0") == (40, 90)


def test_the_gradient_that_a_backward_begins_with_stays_to_its_end() -> None:
    first = replace(PROFILE.layers[0], workspace=200)
    profile = replace(PROFILE, layers=(first, *PROFILE.layers[1:]))
    assert held(make_schedule("1f1b", devices=4, microbatches=4), profile)[0].workspace == 200 + 7 - 100


def test_a_message_that_its_stage_holds_anyway_takes_nothing() -> None:
    layers = tuple(replace(layer, held_output=5) for layer in PROFILE.layers)
    schedule = make_schedule("gpipe", devices=2, microbatches=2)
    assert held(schedule, replace(PROFILE, layers=layers))[0].buffers == 2
    # With remat the stage lets go of it, and only the message has it.
    again = lower.add_recompute(schedule, early=False)
    assert held(again, replace(PROFILE, layers=layers))[0].buffers == 7


def test_gradients_of_what_a_layer_passes_on_are_copied_only_where_a_stage_begins() -> None:
    layers = tuple(replace(layer, workspace=300 + 10 * n, passed=40) for n, layer in enumerate(PROFILE.layers))
    (found,) = held(Schedule.parse("0: 0F0 0B0"), replace(PROFILE, layers=layers))
    assert found.workspace == 370 - 40
    (alone,) = held(Schedule.parse("0: 0F0 0B0"), replace(PROFILE, layers=layers[:1]))
    assert alone.workspace == 300


def test_what_libraries_keep_is_shared_by_the_layers_of_a_device() -> None:
    layers = tuple(replace(layer, libraries=66 * (number == 7)) for number, layer in enumerate(PROFILE.layers))
    found = held(make_schedule("1f1b", devices=4, microbatches=4), replace(PROFILE, layers=layers))
    assert [device.reserved for device in found] == [1000, 1000, 1000, 1066]


def test_an_optimizer_step_counts_where_it_takes_more_than_the_actions() -> None:
    schedule = make_schedule("1f1b", devices=4, microbatches=8)
    layers = tuple(replace(layer, update_workspace=204) for layer in PROFILE.layers)
    found = held(schedule, replace(PROFILE, layers=layers))
    assert [(device.activations, device.workspace) for device in found] == [(800, 0), (600, 0), (0, 408), (0, 408)]


def test_what_the_allocator_loses_is_the_profile_s_unless_given() -> None:
    schedule = make_schedule("1f1b", devices=1, microbatches=4)
    profile = replace(PROFILE, slack=0.25)
    assert held(schedule, profile)[0].slack == 0.25 * 800
    assert held(schedule, profile, slack=0.5)[0].slack == 0.5 * 800
    assert held(schedule)[0].slack == 0.05 * 800


def test_a_vee_has_no_message_where_it_turns() -> None:
    schedule = make_schedule("zb-v", devices=2, microbatches=4)
    assert schedule.placement == vee(2)
    # Forwards go from device 0 to 1 and, from stage 2 to 3, back. Two of device 0 wait while device 1 runs 1F0 and 2F0.
    assert [device.buffers for device in held(schedule)] == [14, 7]


def test_messages_that_nobody_has_taken_yet_are_counted() -> None:
    # Device 1 takes ten times as long, so what device 0 sends piles up: all but the one that is being worked on.
    fast = tuple(profiles.layer(1e-3 if n < 4 else 1e-2, 10, 100, 7) for n in range(8))
    gpipe = make_schedule("gpipe", devices=2, microbatches=6)
    assert held(gpipe, replace(PROFILE, layers=fast))[0].buffers == 7 * 4
    # Where the stage holds it anyway, the message takes nothing more.
    kept = tuple(replace(layer, held_output=7) for layer in fast)
    assert held(gpipe, replace(PROFILE, layers=kept))[0].buffers == 0


def test_how_often_a_stage_is_there_at_the_peak() -> None:
    schedule = make_schedule("1f1b", devices=4, microbatches=8)
    assert in_flight_at_peak(schedule, stages_for(schedule)) == (4, 3, 2, 1)
    vee_ = make_schedule("zb-v", devices=2, microbatches=6)
    times = in_flight_at_peak(vee_, stages_for(vee_))
    for device, own in enumerate(vee_.placement.stages):
        assert 200 * sum(times[stage] for stage in own) == held(vee_)[device].activations


def test_the_fullest_device_comes_first() -> None:
    found = held(make_schedule("1f1b", devices=4, microbatches=8))
    limits = [found[0].total - 1, found[1].total - 9, found[2].total, None]
    assert over_limit(found, limits) == [1, 0]


def test_layer_by_layer_inputs_behind_the_running_layer_are_not_there() -> None:
    # All inputs counted beside the largest layer with its own input: 350 of what are at most 320 bytes.
    first, last = (profiles.layer(1.0, 0, size, boundary) for size, boundary in ((300, 20), (100, 4)))

    def held(passed: int) -> Footprint:
        layers = (replace(first, passed=passed), last)
        profile = Profile("", layers, input=30, slack=0.0)
        schedule = make_schedule("1f1b", devices=1, microbatches=1)
        stages = make_stages(profile, (2,), schedule.placement, Mesh(1, 1), [1.0], ["layer"])
        return footprints(profile, stages, simulate(schedule, stages.costs))[0]

    # While layer 0 runs again: its 300 bytes with its input, and the gradient of what it returns.
    assert (held(0).activations, held(0).workspace) == (300, 20)
    # What layer 1 takes is what layer 0 took: it stays.
    assert held(20).activations == 300
