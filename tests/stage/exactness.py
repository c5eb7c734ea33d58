"""The one comparison these tests make: stages run by hand against the plain loop, every bit."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gapless.stage.batch import microbatch as mb
from gapless.stage.batch.loss_counts import told
from gapless.stage.batch.plain import PlainResult, plain_step
from gapless.stage.stage import Stage

Layers = Sequence[Callable[..., Any]]
Context = Callable[[], contextlib.AbstractContextManager[Any]]


# Whether backwards are split, and remat.
MODES = ((False, "none"), (True, "none"), (False, "stage"), (True, "stage"), (True, "layer"))


def mean_square(outputs: Any, target: Any) -> Tensor:
    """A loss for any outputs: the first floating tensor of the tree, squared."""
    tensor = next(tensor for tensor in mb.flatten(outputs)[0] if tensor.is_floating_point())
    return tensor.float().square().mean()


def make_stages(layers: Layers, cuts: Sequence[int], loss: Callable[[Any, Any], Tensor], **options: Any) -> list[Stage]:
    """Stages of these layers, cut before the layers whose numbers `cuts` gives."""
    bounds = [0, *cuts, len(layers)]
    stages = []
    for start, end in itertools.pairwise(bounds):
        last = loss if end == len(layers) else None
        stages.append(Stage(layers[start:end], first_layer=start, loss=last, spread=start == 0, **options))
    return stages


def run_step(
    stages: Sequence[Stage],
    inputs: Any,
    target: Any = None,
    *,
    microbatches: int,
    split: bool,
    step: int = 0,
    loss_weight: mb.LossWeight = None,
    together: bool = True,
) -> PlainResult:
    """All forwards, then all backwards (`together`), or microbatch by microbatch; the halves of a backward apart."""
    size = mb.batch_size(inputs)
    parts = mb.split(inputs, microbatches)
    targets = [None] * len(parts) if target is None else mb.split(target, len(parts), size=size)
    counts = mb.sizes(size, len(parts))
    numbers = counts if loss_weight is None else told(loss_weight, targets).numbers
    weights = [1.0 if loss_weight == "sum" else number / sum(numbers) for number in numbers]
    losses: list[Tensor] = []
    outputs: list[Any] = []

    def forward(m: int) -> None:
        value = parts[m]
        for stage in stages:
            value = stage.forward(m, value, step=step, target=targets[m], weight=weights[m])
        outputs.append(value[0])
        losses.append(value[1])

    def backward(m: int) -> None:
        grads = None
        for stage in reversed(stages):
            if split:
                grads = stage.backward_input(m, grads)
            else:
                grads = stage.backward(m, grads)
        if split and not together:
            weight(m)

    def weight(m: int) -> None:
        for stage in stages:
            stage.backward_weight(m)

    for m in range(len(parts)):
        forward(m)
        if not together:
            backward(m)
    for m in range(len(parts) if together else 0):
        backward(m)
    for m in range(len(parts) if together and split else 0):
        weight(m)
    total = losses[0] * weights[0]
    for loss, share in zip(losses[1:], weights[1:], strict=True):
        total = total + loss * share
    assert all(stage.live == 0 for stage in stages)
    return PlainResult(total, losses, mb.merge(outputs, counts))


def parameters(layers: Layers) -> list[nn.Parameter]:
    """Every parameter once."""
    return list(nn.ModuleList([layer for layer in layers if isinstance(layer, nn.Module)]).parameters())


def assert_same_gradients(layers: Layers, reference: Layers) -> None:
    """Every gradient is there or not as in the reference, with its bits and its layout, and none is another's."""
    seen: dict[int, str] = {}
    for number, (ours, plain) in enumerate(zip(parameters(layers), parameters(reference), strict=True)):
        if plain.grad is None:
            assert ours.grad is None, f"parameter {number} {tuple(ours.shape)} has a gradient that it should not have"
            continue
        assert ours.grad is not None, f"parameter {number} {tuple(ours.shape)} has no gradient"
        assert ours.grad.dtype == plain.grad.dtype
        where = f"parameter {number} {tuple(ours.shape)}: {(ours.grad - plain.grad).abs().max() if ours.numel() else 0}"
        assert torch.equal(ours.grad, plain.grad), where
        assert ours.grad.stride() == plain.grad.stride(), where
        if ours.numel():
            assert ours.grad.data_ptr() not in seen, f"{where} shares its gradient with {seen[ours.grad.data_ptr()]}"
            seen[ours.grad.data_ptr()] = where


def assert_same_as_plain(
    layers: Layers,
    inputs: Any,
    target: Any = None,
    *,
    cuts: Sequence[int] = (),
    loss: Callable[[Any, Any], Tensor] = mean_square,
    microbatches: int = 3,
    steps: int = 2,
    context: Context = contextlib.nullcontext,
    modes: Sequence[tuple[bool, str]] = MODES,
    loss_weight: mb.LossWeight = None,
) -> None:
    """Over several steps without zero_grad: losses, outputs and gradients of the stages are those of the plain loop."""
    reference = copy.deepcopy(layers)
    results = []
    asked: dict[str, Any] = {"microbatches": microbatches, "loss_weight": loss_weight}
    for step in range(steps):
        with context():
            results.append(plain_step(reference, inputs, target, loss=loss, seed=7, step=step, **asked))
    for split, remat in modes:
        ours = copy.deepcopy(layers)
        stages = make_stages(ours, cuts, loss, seed=7, split=split, remat=remat)
        for step, expected in enumerate(results):
            state = torch.get_rng_state()
            with context():
                got = run_step(stages, inputs, target, split=split, step=step, together=step % 2 == 0, **asked)
            assert torch.equal(state, torch.get_rng_state()), "torch's default generator was moved"
            where = f"split={split}, remat={remat}, step={step}"
            assert torch.equal(got.loss, expected.loss), where
            assert all(torch.equal(a, b) for a, b in zip(got.losses, expected.losses, strict=True)), where
            for a, b in zip(mb.flatten(got.outputs)[0], mb.flatten(expected.outputs)[0], strict=True):
                assert torch.equal(a, b), where
        try:
            assert_same_gradients(ours, reference)
        except AssertionError as error:
            raise AssertionError(f"split={split}, remat={remat}: {error}") from error
