"""A model of the zoo, trained for some steps by the plain loop and in stages: losses, outputs, gradients, buffers and
weights are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gapless
from gapless.model.reference import Reference
from tests.pipelines import assert_same

SEED = 7
MICROBATCHES = 4
STEPS = 3
# tests/test_pipeline_exact.py has schedules, devices and remats in all pairs: of a model of the zoo these are enough.
_DAILY = {("interleaved", 4, "none"), ("zb-v", 2, "stage")}
CASES = [
    pytest.param(schedule, devices, remat, marks=() if (schedule, devices, remat) in _DAILY else pytest.mark.slow)
    for devices in (2, 3, 4)
    for schedule in ("gpipe", "1f1b", "interleaved", "zb-v")
    for remat in ("none", "stage")
]


@dataclass(frozen=True)
class Subject:
    """How a model is made, and what it is trained on."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Any, Tensor]]
    loss: Callable[[Any, Any], Tensor]
    options: tuple[tuple[str, Any], ...] = ()  # of Pipeline and plain_step alike


@dataclass(frozen=True)
class Step:
    """All that a step leaves; `weights` are those after the optimizer's turn."""

    loss: Tensor
    losses: tuple[Tensor, ...]
    outputs: Any
    grads: list[Tensor]
    buffers: list[Tensor]
    weights: list[Tensor]


def trained(subject: Subject, model: nn.Module, step: Callable[[int, Any, Any], Any]) -> list[Step]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(5)
    batches = [subject.batch() for _ in range(STEPS)]  # beforehand: the plain loop leaves torch's generator reseeded
    done = []
    for number, (inputs, target) in enumerate(batches):
        result = step(number, inputs, target)
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        buffers = [b.clone() for b in model.buffers()]
        weights = [p.detach().clone() for p in model.parameters()]
        done.append(Step(result.loss, tuple(result.losses), result.outputs, grads, buffers, weights))
    return done


def assert_learns_by_heart(model: nn.Module, inputs: tuple[Tensor, ...], target: Tensor, loss: Any) -> None:
    """A batch, in 30 steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        losses.append(loss(model(*inputs), target))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 3


def made(subject: Subject) -> nn.Module:
    torch.manual_seed(3)
    return subject.make()


def plainly(subject: Subject) -> list[Step]:
    """By the plain loop."""
    model = made(subject)

    options: dict[str, Any] = {
        "loss": subject.loss,
        "microbatches": MICROBATCHES,
        "seed": SEED,
        **dict(subject.options),
    }
    if isinstance(model, nn.Sequential):
        return trained(subject, model, lambda number, x, y: gapless.plain_step(model, x, y, step=number, **options))
    reference = Reference(model)  # what plain_step makes; kept, so that the model is traced once
    return trained(subject, model, lambda number, x, y: reference.step(x, y, step=number, **options))


def in_stages(subject: Subject, **options: Any) -> list[Step]:
    """By a pipeline."""
    model = made(subject)
    with gapless.Pipeline(
        model,
        microbatches=MICROBATCHES,
        loss=subject.loss,
        seed=SEED,
        **dict(subject.options),
        **options,
    ) as pipe:
        return trained(subject, model, lambda _, inputs, target: pipe.step(inputs, target, outputs=True))


def assert_same_steps(ours: list[Step], plain: list[Step]) -> None:
    for number, (one, other) in enumerate(zip(ours, plain, strict=True)):
        for name in ("loss", "losses", "outputs", "grads", "buffers", "weights"):
            assert_same(getattr(one, name), getattr(other, name), f"step {number}, {name}")
