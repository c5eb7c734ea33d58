"""Training as a user writes it, without a line of the library: what pipelines are compared with, every bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def loop(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, microbatches: int = 4) -> Tensor:
    """One minibatch: its loss; gradients are added to `.grad`."""
    total = torch.zeros(())
    for part, goal in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
        loss = F.mse_loss(model(part), goal) * (len(part) / len(x))
        loss.backward()
        total = total + loss.detach()
    return total


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
