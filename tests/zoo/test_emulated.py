"""Emulated layers take the time they are told to, and their gradients are real."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from gapless.stage.stage import Stage
from gapless.zoo.emulated import Emulated, overshoot, wait_until
from tests.stage.exactness import assert_same_as_plain, mean_square

pytestmark = pytest.mark.alone  # they take as long as they are told to

EARLY = 0.0005  # a sleep may end this much too early: what is taken off for its overshoot, at most


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def test_gradients_are_those_of_the_plain_loop() -> None:
    layers = [Emulated(forward=0.0, input_grad=0.0, weight_grad=0.0, size=5) for _ in range(3)]
    assert_same_as_plain(layers, layers[0].samples(7), cuts=(1, 2))


@pytest.mark.parametrize("separate", [False, True])
def test_a_large_sample_is_handed_on_where_it_is(separate: bool) -> None:
    """Something added to all of its numbers took as much of a processor as to send them to another process."""
    layer = Emulated(forward=0.0, input_grad=0.0, weight_grad=0.0, size=1000, separate=separate)
    x = layer.samples(2).requires_grad_()
    y = layer(x)
    assert y.data_ptr() == x.data_ptr()
    y.backward(torch.full_like(y, 3.0))
    assert layer.weight.grad is not None
    assert layer.weight.grad.item() == 6.0
    assert x.grad is not None
    assert x.grad.eq(3.0).all()


def test_each_part_takes_its_own_time() -> None:
    stage = Stage(
        [Emulated(forward=0.004, input_grad=0.008, weight_grad=0.012)], first_layer=0, split=True, loss=mean_square
    )
    x = torch.ones(2, 1, requires_grad=True)
    spans: list[tuple[float, float, float]] = []
    for microbatch in range(7):
        forward = seconds(partial(stage.forward, microbatch, x, step=0))
        inputs = seconds(partial(stage.backward_input, microbatch, None))
        weights = seconds(partial(stage.backward_weight, microbatch))
        spans.append((forward, inputs, weights))
    for expected, measured in zip((0.004, 0.008, 0.012), zip(*spans, strict=True), strict=True):
        assert statistics.median(measured) >= expected - EARLY


def test_an_unsplit_backward_takes_both_times() -> None:
    layer = Emulated(forward=0.0, input_grad=0.004, weight_grad=0.006)
    loss = layer(torch.ones(2, 1, requires_grad=True)).sum()
    assert seconds(loss.backward) >= 0.010 - 2 * EARLY


@pytest.mark.skipif(torch.__version__ < "2.13", reason="this torch can't split a custom function's backward")
def test_the_split_of_torchs_own_pipelining_sleeps_each_half_where_it_runs_it() -> None:
    layer = Emulated(forward=0.0, input_grad=0.004, weight_grad=0.016, separate=True)
    x = torch.ones(2, 1, requires_grad=True)
    y = layer(x)
    parts: list[Any] = []
    first = seconds(lambda: parts.extend(stage_backward_input([y], [torch.ones_like(y)], [x], layer.parameters())))
    assert first >= 0.004 - EARLY
    assert layer.weight.grad is None
    assert seconds(lambda: stage_backward_weight(layer.parameters(), parts[1])) >= 0.016 - EARLY
    assert layer.weight.grad is not None
    assert layer.weight.grad.item() == 2.0


def test_eight_of_them_sleep_at_once_on_any_number_of_cores() -> None:
    together = threading.Barrier(8)
    spans: list[tuple[float, float]] = []

    def work() -> None:
        together.wait()
        start = time.perf_counter()
        wait_until(start + 1.0)
        spans.append((start, time.perf_counter()))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(start for start, _ in spans) < min(end for _, end in spans)


def test_the_overshoot_is_small() -> None:
    assert 0.0 <= overshoot() <= EARLY
