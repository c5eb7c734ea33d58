"""Measuring: what a layer holds to the byte, what it takes, and that the model stays as it was."""

import gc
import threading
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gapless.errors import ConfigError
from gapless.plan.profile.contention import ALONE
from gapless.plan.profile.file import parse_profile, profile_text
from gapless.plan.profile.measure import hop, measure
from gapless.plan.profile.meter import (
    EXPANDABLE_SLACK,
    PAGE,
    SEGMENTED_SLACK,
    GpuMeter,
    StorageMeter,
    bytes_of,
    has_expandable_segments,
)
from gapless.plan.profile.profile import Profile
from gapless.stage.random.exclusive import is_held
from gapless.zoo.emulated import Emulated
from tests.pipelines import Do, Own

WIDTH, SAMPLES = 16, 8
BOUNDARY = 4 * WIDTH * SAMPLES


def layers() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False)]


def profiled(model: list[nn.Module], **more: object) -> Profile:
    x = torch.linspace(-1, 1, SAMPLES * WIDTH).view(SAMPLES, WIDTH)
    return measure(model, x, torch.zeros_like(x), loss=F.mse_loss, seconds=0.01, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("alone", [False, True], ids=["run", "without running"])
def test_sizes_are_right_to_the_byte(alone: bool) -> None:
    linear, tanh, last = profiled(layers(), sizes_alone=alone).layers
    assert linear.parameters == linear.gradients == 4 * (WIDTH * WIDTH + WIDTH)
    assert linear.optimizer_state == 2 * linear.parameters + 2 * 4  # AdamW counts the steps of each parameter
    assert (linear.boundary, tanh.boundary) == (BOUNDARY, BOUNDARY)
    assert linear.activation == BOUNDARY  # its input
    assert (tanh.parameters, tanh.optimizer_state) == (0, 0)
    # tanh keeps its result for the backward; as a stage of its own it has its input too, which no backward needs.
    assert (tanh.activation, tanh.overlap) == (2 * BOUNDARY, BOUNDARY)
    assert last.overlap == BOUNDARY  # what tanh keeps is the input of the next
    assert last.activation >= 2 * BOUNDARY  # its input, and the difference that the loss needs
    assert tanh.workspace == 2 * BOUNDARY  # the gradient that its backward begins with, and the one that it makes


class Notes(nn.Module):
    """Of each forward, whether all that it calls is watched, as a first call is."""

    watched: ClassVar[list[bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.watched.append(is_held())  # the lock around what all threads share
        return 2 * x


def test_most_forwards_that_are_timed_are_those_of_ordinary_steps() -> None:
    """All were those of a first step, which is watched: plans said 1.5 times what a step of small layers takes."""
    Notes.watched.clear()
    profiled([nn.Linear(WIDTH, WIDTH), Notes(), nn.Linear(WIDTH, WIDTH)])
    assert Notes.watched[0]
    timed = Notes.watched[len(Notes.watched) // 2 :]  # sizes come first, and two rounds that do not count
    assert timed.count(False) > len(timed) / 2


def test_the_collector_rests_while_a_gpu_s_memory_is_read() -> None:
    with GpuMeter(torch.device("cuda:0")).on():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_a_layer_returns_may_be_held_anyway() -> None:
    linear, tanh, skip, _ = profiled([nn.Linear(WIDTH, WIDTH), nn.Tanh(), Do(lambda x: (x, 2 * x)), Do(sum)]).layers
    assert (linear.held_output, tanh.held_output) == (0, BOUNDARY)  # tanh needs its result for the backward
    assert (linear.passed, tanh.passed, skip.passed) == (0, 0, BOUNDARY)


def test_what_waits_for_a_weight_gradient_is_the_input_and_the_gradient() -> None:
    linear, tanh, last = profiled(layers()).layers
    assert linear.kept_for_weight_grad == 2 * BOUNDARY
    assert (linear.kept_input, tanh.kept_input, last.kept_input) == (BOUNDARY, 0, BOUNDARY)
    assert tanh.kept_for_weight_grad == 0
    # Its W makes the gradients of weight and bias one after the other, and lets go of each before the next.
    assert linear.parameters > linear.weight_workspace >= 4 * WIDTH * WIDTH
    assert linear.forward_workspace == BOUNDARY  # its result, which it does not keep
    assert (linear.libraries, profiled(layers()).slack) == (0, 0.05)  # a CPU's keep nothing


def test_what_was_not_run_has_no_times() -> None:
    assert {layer.forward.median for layer in profiled(layers(), sizes_alone=True).layers} == {0.0}


def own() -> nn.Module:
    """Nobody knows beforehand what it draws."""
    return Do(lambda linear, x: F.relu(linear(x)), nn.Linear(6, 6))


def test_sizes_of_a_model_that_is_watched_for_draws_are_known_without_running_it() -> None:
    # Where a call may draw unseen, generators are compared before and after, which tensors without data can't be.
    x, y = torch.randn(2, 6), torch.zeros(2, 6)
    found = measure([own(), own()], x, y, loss=F.mse_loss, sizes_alone=True).layers
    assert [(layer.parameters, layer.boundary) for layer in found] == [(4 * 42, 48)] * 2
    assert all(layer.activation > 0 for layer in found)


def test_a_model_without_data_is_measured_without_running_it() -> None:
    with torch.device("meta"):
        empty = layers()
    real, fake = profiled(layers(), sizes_alone=True), profiled(empty, sizes_alone=True)
    assert real == fake
    before = torch.get_rng_state()
    assert all(layer.forward.median > 0 for layer in profiled(empty).layers)  # with any values
    assert torch.equal(torch.get_rng_state(), before)  # which are not drawn from the program's own numbers


@pytest.mark.alone
@pytest.mark.parametrize("quiet", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_times_are_those_of_the_actions(quiet: bool) -> None:
    """What it takes to begin a stage is taken off."""
    model: list[nn.Module] = [Emulated(forward=0.004, input_grad=0.012, weight_grad=0.024) for _ in range(2)]
    x = torch.zeros(2, 1).requires_grad_()
    first, second = measure(model, x, None, loss=lambda y, _: y.sum(), seconds=1.0).layers
    for layer in (first, second):
        assert layer.forward.median >= 0.8 * 0.004
        assert layer.input_grad.median >= 0.8 * 0.012
        assert layer.weight_grad.median >= 0.8 * 0.024
        assert layer.recompute.median >= 0.8 * 0.004
        if quiet:  # a busy machine takes longer
            assert layer.forward.median < layer.input_grad.median < layer.weight_grad.median < layer.whole_backward
            assert layer.recompute.median < layer.input_grad.median


def test_a_device_alone_takes_no_longer_and_two_are_measured_beside_each_other() -> None:
    assert profiled(layers()).contention == ALONE
    found = profiled(layers(), side_by_side=2, threads=1).contention
    assert all(times >= 1 for times in (found.forward, found.backward, found.halves))


def test_what_it_takes_to_begin_a_stage_is_no_part_of_its_layers() -> None:
    profile = profiled([nn.Tanh() for _ in range(8)])
    assert profile.entry.backward > 0  # eight backwards, or one: there is next to nothing else to do


def test_the_model_stays_as_it_was() -> None:
    model = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)]
    before = {name: tensor.clone() for name, tensor in nn.ModuleList(model).state_dict().items()}
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    profiled(model, side_by_side=2, threads=1)
    after = nn.ModuleList(model).state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert all(parameter.grad is None for layer in model for parameter in layer.parameters())
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_trees_pass_between_layers_and_a_measured_profile_can_be_written() -> None:
    def summed(layer: Any, value: Any) -> Any:
        return layer.weight * (value[0] + value[1]["twice"])

    profile = profiled(
        [
            nn.Linear(WIDTH, WIDTH),
            Do(lambda x: (x, {"twice": 2 * x})),
            Own(summed, weight=nn.Parameter(torch.ones(WIDTH))),
        ]
    )
    assert profile.layers[1].boundary == 2 * BOUNDARY
    assert profile.layers[1].name == "1.Do"
    assert profile.samples == SAMPLES
    assert parse_profile(profile_text(profile)) == profile


def test_no_layers_are_no_model() -> None:
    with pytest.raises(ConfigError, match="no layers to measure"):
        profiled([])


def test_what_fails_in_a_layer_is_told_whoever_measures() -> None:
    def bad(x: Tensor) -> Tensor:
        raise ValueError("bad layer")

    with pytest.raises(ValueError, match="bad layer"):
        profiled([nn.Linear(WIDTH, WIDTH), Do(bad)], side_by_side=2)


def test_storages_count_once_and_until_they_die() -> None:
    meter = StorageMeter()
    with meter.on():
        one = torch.zeros(100)
        view = one[10:].view(9, 10)
        assert meter.live() == bytes_of([one, view]) == 400
        two = one + 1
        del two
        assert (meter.live(), meter.peak()) == (400, 800)
        del one
        assert (meter.live(), meter.peak()) == (400, 400)
    del view
    assert meter.live() == 0


def test_a_hop_between_threads_takes_some_time() -> None:
    assert 0 < hop(20).latency < 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_is_measured_by_its_events_and_its_allocator() -> None:
    profile = profiled(layers(), device="cuda")
    linear = profile.layers[0]
    assert linear.forward.median > 0
    assert linear.activation >= BOUNDARY
    assert profile.device.startswith("cuda")
    assert linear.libraries > 0  # cuBLAS has a workspace
    assert linear.update_workspace >= linear.parameters  # AdamW updates all parameters at once
    assert profile.layers[1].libraries == 0
    assert profile.reserved == PAGE
    assert profile.slack == (EXPANDABLE_SLACK if has_expandable_segments(torch.device("cuda")) else SEGMENTED_SLACK)


def test_autocast_of_the_caller_holds_in_the_threads_that_measure() -> None:
    seen = set()

    def look(x: Tensor) -> Tensor:
        seen.add((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return x * 2

    with torch.autocast("cpu", torch.bfloat16):
        profiled([nn.Linear(WIDTH, WIDTH), Do(look), nn.Linear(WIDTH, WIDTH)], side_by_side=2)
    assert seen == {(True, torch.bfloat16)}


def test_measuring_leaves_the_number_of_threads_alone() -> None:
    def in_a_new_thread() -> int:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return found[0]

    torch.set_num_threads(2)
    for _ in range(2):
        profiled(layers(), threads=1, side_by_side=2)
        assert (torch.get_num_threads(), in_a_new_thread()) == (2, 2)
