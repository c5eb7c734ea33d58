"""Training as a user writes it, with nothing of gapless but its seeds: what pipelines are compared with, every bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless


def loop(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, microbatches: int = 4) -> Tensor:
    """One minibatch: its loss; gradients are added to `.grad`."""
    total = torch.zeros(())
    for part, goal in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
        loss = F.mse_loss(model(part), goal) * (len(part) / len(x))
        loss.backward()
        total = total + loss.detach()
    return total


def seeded_loop(
    layers: Iterable[Callable[..., Any]],
    x: Tensor,
    y: Tensor,
    *,
    loss: Callable[[Any, Any], Tensor] = F.mse_loss,
    microbatches: int = 4,
    seed: int = 0,
    step: int = 0,
    first: int = 0,
    samples: int | None = None,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[Tensor]:
    """One minibatch through layers that draw, each from its own seed: the losses of its microbatches, which are
    numbered from `first` on. They count by their share of `samples`, which are those of the minibatch alone if nobody
    says otherwise.
    """
    losses, layers = [], list(layers)
    parts = zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True)
    for microbatch, (part, goal) in enumerate(parts, first):
        with around():
            value: Any = part.clone()  # which a layer may write into
            for number, layer in enumerate(layers):
                torch.manual_seed(gapless.seed_of(seed, step, microbatch, number))
                value = layer(value)
            found = loss(value, goal)
        (found * (len(part) / (samples or len(x)))).backward()
        losses.append(found.detach())
    return losses


def same(ours: Tensor | None, plain: Tensor) -> bool:
    return ours is not None and torch.equal(ours, plain)


def in_order(layers: Sequence[Callable[..., Any]]) -> Callable[[Tensor], Tensor]:
    """A list of layers as one function."""

    def run(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return run


def assert_same_bits(ours: nn.Module, plain: nn.Module, where: str = "") -> None:
    """Parameters, gradients and buffers, by name."""
    theirs = dict(plain.named_parameters())
    assert list(theirs) == [name for name, _ in ours.named_parameters()], where
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, theirs[name]), f"{where} {name}"
        grad, expected = parameter.grad, theirs[name].grad
        assert (grad is None) == (expected is None), f"{where} {name}: {grad} for {expected}"
        assert grad is None or torch.equal(grad, expected), f"{where} {name}, its gradient"  # type: ignore[arg-type]
    for (name, buffer), (_, expected) in zip(ours.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(buffer, expected), f"{where} {name}"
