"""The one comparison of these tests: a model through a pipeline against its own plain loop, every bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import gapless
from gapless.model.traced.capture import find_loss, own_loss
from gapless.stage.batch import microbatch as mb

Loss = Callable[[Any, Any], Tensor]
# Devices, schedule, remat: each at least once.
WAYS = (
    (2, "gpipe", "none"),
    (3, "1f1b", "stage"),
    (2, "interleaved", "none"),
    (2, "zb-v", "stage"),
    (4, "1f1b", "none"),
)


def own_loop(model: nn.Module, inputs: Any, target: Any, loss: Loss, microbatches: int) -> list[Tensor]:
    """What anybody would write: the losses of the microbatches, gradients in `.grad`."""
    size = mb.batch_size(inputs)
    parts = mb.split(inputs, microbatches)
    targets = [None] * len(parts) if target is None else mb.split(target, len(parts), size=size)
    losses = []
    for part, goal, count in zip(parts, targets, mb.sizes(size, len(parts)), strict=True):
        value = loss(called(model, part), goal)
        losses.append(value.detach())
        if value.requires_grad:
            (value * (count / size)).backward()
    return losses


def called(model: Callable[..., Any], part: Any) -> Any:
    if isinstance(part, dict):
        return model(**part)
    return model(*part) if isinstance(part, tuple) else model(part)


def assert_exact(
    model: nn.Module,
    batches: Sequence[tuple[Any, Any]],
    *,
    loss: Loss | None = None,
    microbatches: int = 3,
    devices: int = 2,
    evaluate: bool = True,
    **options: Any,
) -> None:
    """Steps with an optimizer, and then an evaluation if wanted, leave what the model's own loop leaves."""
    reference = copy.deepcopy(model)
    pipe = gapless.Pipeline(model, devices=devices, microbatches=microbatches, loss=loss, **options)
    ours_sgd, plain_sgd = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (pipe, reference))
    with pipe:
        for number, (inputs, target) in enumerate(batches):
            result = pipe.step(copy.deepcopy(inputs), target)
            losses = own_loop(reference, copy.deepcopy(inputs), target, loss or own_loss, microbatches)
            assert_same(result.losses, losses, f"losses of step {number}")
            assert_same_state(model, reference, f"step {number}")
            ours_sgd.step()
            plain_sgd.step()
            if number != 1:  # the next step adds to what is there
                ours_sgd.zero_grad()
                plain_sgd.zero_grad()
        if evaluate:
            assert_same_evaluation(pipe, reference, *batches[-1], microbatches)
        assert model.training
        assert pipe.module() is model


def assert_same_evaluation(
    pipe: gapless.Pipeline, reference: nn.Module, inputs: Any, target: Any, microbatches: int
) -> None:
    result = pipe.evaluate(copy.deepcopy(inputs), target)
    reference.eval()
    with torch.no_grad():
        parts = [called(reference, part) for part in mb.split(copy.deepcopy(inputs), microbatches)]
    own = [find_loss(part) for part in parts] if target is None else [None]
    whole = {}
    if own[0] is not None:  # the model's own loss is that of the minibatch
        assert_same(result.losses, own, "losses of evaluate")
        whole = {id(own[0]): result.loss}
    merged = mb.merge(parts, mb.sizes(mb.batch_size(inputs), len(parts)), whole)
    assert_same(result.outputs, merged, "outputs of evaluate")


def assert_same(ours: Any, plain: Any, where: str) -> None:
    a, b = mb.flatten(ours)[0], mb.flatten(plain)[0]
    assert len(a) == len(b), where
    for number, (one, other) in enumerate(zip(a, b, strict=True)):
        assert torch.equal(one, other), f"{where}, tensor {number}"


def assert_same_state(model: nn.Module, reference: nn.Module, where: str) -> None:
    """Gradients, there or not, and buffers."""
    for (name, ours), plain in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (plain.grad is None), f"{where}, gradient of {name}"
        if ours.grad is not None and plain.grad is not None:
            assert torch.equal(ours.grad, plain.grad), f"{where}, gradient of {name}"
    for (name, buffer), other in zip(model.named_buffers(), reference.buffers(), strict=True):
        assert torch.equal(buffer, other), f"{where}, buffer {name}"
