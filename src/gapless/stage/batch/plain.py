"""The reference: the plain loop over microbatches on one device, which every schedule, split and remat is compared
with, bit by bit.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from gapless.stage.auxiliary import collected
from gapless.stage.norm.batchnorm_calls import PlainMode, recomputed
from gapless.stage.norm.running_statistics import BatchNorm, Statistics
from gapless.stage.random.seeds import seed_of

from . import microbatch as mb
from .loss_counts import Weigh, is_known, weighed
from .loss_divisors import Divisors
from .minibatch import Minibatch
from .share import Share


@dataclasses.dataclass(frozen=True)
class PlainResult:
    """The loss of the minibatch, those of its microbatches in order (unweighted), the merged outputs; all detached."""

    loss: Tensor
    losses: list[Tensor]
    outputs: Any


def plain_step(
    layers: Sequence[Callable[..., Any]],
    inputs: Any,
    target: Any = None,
    *,
    loss: Callable[[Any, Any], Tensor],
    microbatches: int,
    seed: int = 0,
    step: int = 0,
    loss_weight: mb.LossWeight = None,
    batch_dims: Any = None,
    target_dims: Any = None,
    batchnorm: BatchNorm = "microbatch",
    weight: float | Fraction = 1.0,
    cut: bool = True,
    weigh: Weigh | None = None,
    own: Callable[[Any], Tensor | None] | None = None,
) -> PlainResult:
    """Forward and backward of a minibatch by plain torch; gradients are added to `.grad`. `weigh` tells what the
    microbatches count, where nothing else does; `own` finds the loss among the outputs of a model that computes it.

    Each layer draws after `torch.manual_seed(seed_of(seed, step, microbatch, layer))`, so torch's default generators
    are left reseeded. The backward runs outside of autocast, as torch advises.
    """
    if cut:
        batch = Minibatch.cut(inputs, target, microbatches, batch_dims, target_dims)
    else:
        batch = Minibatch.given(inputs, target, microbatches, batch_dims, weighed=loss_weight is not None)
    counted = weighed(loss, loss_weight, batch) if weigh is None else weigh(batch)
    counted.check_kept()
    weights = Share.of(weight, True).shares(counted.numbers, sum(counted.numbers), summed=counted.summed)
    divisors = None if weigh is not None or loss_weight is not None or is_known(loss) else Divisors()
    losses, outputs = [], []
    statistics = Statistics(batchnorm, layers)
    mode = PlainMode(statistics) if batchnorm != "microbatch" else contextlib.nullcontext()
    for microbatch, (part, goal, share) in enumerate(zip(batch.parts, batch.targets, weights, strict=True)):
        value = part
        statistics.enter(microbatch, replaying=False)
        with mode, collected() as added:
            for number, layer in enumerate(layers):
                torch.manual_seed(seed_of(seed, step, microbatch, number))
                value = apply_first(layer, value) if number == 0 else layer(value)
            value_of_loss = loss(value, goal)
            if divisors is not None:
                divisors.note(step, share, value, value_of_loss)
            aux = added.to(None)
            value_of_loss = value_of_loss if aux is None else value_of_loss + aux
        losses.append(value_of_loss.detach())
        outputs.append(detach(value))
        with recomputed(statistics) if statistics.in_checkpoints else contextlib.nullcontext():
            _backward([value_of_loss * share] if share else without_loss(value, aux))
    statistics.finish()
    if divisors is not None:
        divisors.finish()
    total = sum_in_order(losses, weights)
    there = own(outputs[0]) if own is not None else None
    return PlainResult(total, losses, batch.merged(outputs, {} if there is None else {id(there): total}))


def apply_first(layer: Callable[..., Any], inputs: Any) -> Any:
    """Calls the first layer of a model, which takes the minibatch apart."""
    args, kwargs = mb.call_of(inputs)
    return layer(*args, **kwargs)


def detach(tree: Any) -> Any:
    """The same tree with every tensor detached."""
    tensors, shape = mb.flatten(tree)
    return mb.unflatten([tensor.detach() for tensor in tensors], shape)


def sum_in_order(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The loss of the minibatch: its microbatches' losses times their weights, added from the first to the last. One
    without any weight does not count, whatever it is: a mean over nothing is no number.
    """
    terms = [loss * weight for loss, weight in zip(losses, weights, strict=True) if weight]
    if not terms:
        return torch.zeros_like(losses[0])
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def without_loss(outputs: Any, aux: Tensor | None) -> list[Tensor]:
    """Where the backward of a microbatch starts that weighs nothing, with a gradient of zero: at the outputs and at
    what layers have added to the loss, and not at the loss, since a mean over nothing is no number, and zero times that
    is none either.
    """
    starts = [tensor for tensor in mb.flatten(outputs)[0] if tensor.requires_grad and tensor.dim()]
    return [tensor * 0 for tensor in (*starts, *([] if aux is None else [aux]))]


def _backward(starts: Sequence[Tensor]) -> None:
    starts = [tensor for tensor in starts if tensor.requires_grad]
    if starts:
        with torch.autocast(starts[0].device.type, enabled=False):
            torch.autograd.backward(starts, [torch.ones_like(tensor) for tensor in starts])
