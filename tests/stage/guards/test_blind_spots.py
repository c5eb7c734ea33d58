"""`print(pipe)` names the guards that can't look in a pipeline, and says nothing where all can."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import gapless
from gapless.stage.guards.blind_spots import unwatched
from gapless.stage.stage import Stage
from tests.random_models.blocks import Do
from tests.stage.state_loops import linear

BY_INTERCEPTION = "gradients in a forward, weights that a forward freezes, backward in a forward"


def own() -> nn.Module:
    return Do(lambda part, x: part(x), linear())


def said(layers: list[Any], steps: int = 1, **options: Any) -> list[str]:
    """What is printed of guards after some steps."""
    options = {"devices": 2, "microbatches": 4, "loss": F.mse_loss, "intra_op_threads": 1, **options}
    with gapless.Pipeline(layers, **options) as pipe:
        for _ in range(steps):
            pipe.step(torch.randn(8, 6), torch.randn(8, 6))
        return [line.strip() for line in repr(pipe).splitlines() if "not watched" in line]


def test_where_all_can_look_nothing_is_said() -> None:
    assert said([own(), linear(), own()]) == []
    assert said([linear(), nn.Dropout(0.1)], devices=1) == []


def test_compiled_layers_can_not_be_looked_into() -> None:
    (line,) = said([torch.compile(linear(), backend="eager"), linear()])
    assert line.startswith("not watched: stored tensors, ")
    assert line.endswith("(1 compiled layer can't be looked into)")


def test_layers_that_draw_nothing_are_not_intercepted_where_one_thread_computes() -> None:
    assert said([linear(), own()], devices=1, steps=3) == [
        f"not watched: {BY_INTERCEPTION} (1 of your layers drew nothing, so they run without interception)"
    ]


def test_draws_of_others_hide_unseen_ones() -> None:
    stage = Stage([own()], first_layer=0)
    stage.draws_among_others()
    assert list(unwatched([stage], processes=False, replicas=False)) == [
        "not watched: unseen draws (another thread of this process draws from torch's generators during steps)"
    ]


def test_between_processes_a_tensor_that_learns_is_not_seen() -> None:
    lines = [
        list(unwatched([Stage([part], first_layer=0)], processes=True, replicas=True)) for part in (own(), linear())
    ]
    assert lines == [
        ["not watched: trainable tensors that are not parameters (other stages are in other processes)"],
        [],
    ]


def test_replicas_are_not_compared() -> None:
    stage = Stage([linear()], first_layer=0, loss=lambda out, y: F.cross_entropy(out, y))
    stage.watch_divisors()
    assert list(unwatched([stage], processes=False, replicas=True)) == [
        "not watched: what a cross entropy divides by (replicas are not compared)"
    ]
