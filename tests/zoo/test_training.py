"""Models of the zoo learn; and trained for some steps by the plain loop and in stages they have the same losses,
outputs, gradients, buffers and weights, to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.model.reference import Reference
from gapless.zoo.amoebanet import amoebanet
from gapless.zoo.gpt import gpt, next_token_loss
from gapless.zoo.resnet import resnet
from gapless.zoo.transformer import transformer, translation_loss
from gapless.zoo.unet import unet
from tests.pipelines import assert_same
from tests.zoo.test_transformer import cured, sentences

SEED = 7
MICROBATCHES = 4
STEPS = 3


@dataclass(frozen=True)
class Subject:
    """How a model is made, and what it is trained on."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Any, Tensor]]
    loss: Callable[[Any, Any], Tensor]
    options: tuple[tuple[str, Any], ...] = ()  # of Pipeline and plain_step alike


def photos() -> tuple[Tensor, Tensor]:
    return torch.randn(9, 3, 16, 16), torch.randint(5, (9,))


DEFERRED = (("batchnorm", "deferred"),)
SUBJECTS = {
    "resnet": Subject(lambda: resnet(18, classes=5, width=4), photos, F.cross_entropy, DEFERRED),
    "bottlenecks": Subject(lambda: resnet(50, classes=5, width=2), photos, F.cross_entropy, DEFERRED),
    "unet": Subject(
        lambda: unet(depth=2, width=4, channels=1, classes=3),
        lambda: (torch.randn(8, 1, 8, 8), torch.randint(3, (8, 8, 8))),
        F.cross_entropy,
        DEFERRED,
    ),
    "transformer": Subject(
        lambda: transformer(vocab=13, width=8, depth=1, heads=2, context=8, dropout=0.1), sentences, translation_loss
    ),
    "one vocabulary": Subject(cured, sentences, translation_loss),
    "amoebanet": Subject(
        lambda: amoebanet(cells=3, filters=8, classes=5, dropout=0.1),
        lambda: (torch.randn(8, 3, 32, 32), torch.randint(5, (8,))),
        F.cross_entropy,
    ),
}
# tests/test_pipeline_exact.py has schedules, devices and remats in all pairs: of a model of the zoo these are enough.
_DAILY = (("resnet", "zb-v", 2, "stage"), ("transformer", "interleaved", 4, "none"))
CASES = [
    pytest.param(*case, marks=() if case in _DAILY else pytest.mark.slow)
    for case in product(
        ("resnet", "unet", "transformer"), ("gpipe", "1f1b", "interleaved", "zb-v"), (2, 3, 4), ("none", "stage")
    )
]
CASES += [
    pytest.param("resnet", "zb-v", 2, "layer"),
    pytest.param("bottlenecks", "zb-h1", 3, "stage"),
    pytest.param("amoebanet", "zb-h1", 3, "none"),
    pytest.param("one vocabulary", "1f1b", 2, "none", marks=pytest.mark.slow),
]


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


def made(subject: Subject) -> nn.Module:
    torch.manual_seed(3)
    return subject.make()


@functools.cache
def plain(name: str) -> list[Step]:
    """By the plain loop."""
    subject = SUBJECTS[name]
    model = made(subject)
    options: dict[str, Any] = {"loss": subject.loss, "microbatches": MICROBATCHES, "seed": SEED}
    options |= dict(subject.options)
    if isinstance(model, nn.Sequential):
        return trained(subject, model, lambda number, x, y: gapless.plain_step(model, x, y, step=number, **options))
    reference = Reference(model)  # what plain_step makes; kept, so that the model is traced once
    return trained(subject, model, lambda number, x, y: reference.step(x, y, step=number, **options))


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize(("name", "schedule", "devices", "remat"), CASES)
def test_in_stages_a_model_gives_the_bits_of_the_plain_loop(name: str, schedule: str, devices: int, remat: Any) -> None:
    subject, asked = SUBJECTS[name], {"schedule": schedule, "devices": devices, "remat": remat}
    model = made(subject)
    with gapless.Pipeline(
        model, microbatches=MICROBATCHES, loss=subject.loss, seed=SEED, **dict(subject.options), **asked
    ) as pipe:
        ours = trained(subject, model, lambda _, inputs, target: pipe.step(inputs, target, outputs=True))
    for number, (one, other) in enumerate(zip(ours, plain(name), strict=True)):
        for part in ("loss", "losses", "outputs", "grads", "buffers", "weights"):
            assert_same(getattr(one, part), getattr(other, part), f"step {number}, {part}")


@pytest.mark.parametrize("name", ["resnet", "unet"])
def test_a_minibatch_counts_once_for_every_batch_norm(name: str) -> None:
    counters = [buffer for buffer in plain(name)[-1].buffers if buffer.dtype == torch.int64]
    assert counters
    assert all(int(counter) == STEPS for counter in counters)


def maps() -> tuple[Tensor, Tensor]:
    x = torch.randn(4, 1, 8, 8)
    return x, (x[:, 0] > 0).long()


def text() -> tuple[Tensor, Tensor]:
    ids = torch.randint(19, (4, 8))
    return ids, ids.roll(-1, 1)


@pytest.mark.parametrize(
    "subject",
    [
        Subject(
            lambda: resnet(18, classes=3, width=4),
            lambda: (torch.randn(8, 3, 32, 32), torch.randint(3, (8,))),
            F.cross_entropy,
        ),
        Subject(lambda: unet(depth=2, width=8, channels=1), maps, F.cross_entropy),
        Subject(lambda: gpt(vocab=19, width=32, depth=1, heads=2, context=8), text, next_token_loss),
        Subject(
            lambda: transformer(vocab=13, width=32, depth=1, heads=2, context=8), lambda: sentences(4), translation_loss
        ),
    ],
    ids=["resnet", "unet", "gpt", "transformer"],
)
def test_a_model_learns_a_batch_by_heart(subject: Subject) -> None:
    model = subject.make()
    inputs, target = subject.batch()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(30):
        optimizer.zero_grad()
        losses.append(subject.loss(model(*inputs) if isinstance(inputs, tuple) else model(inputs), target))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 3
