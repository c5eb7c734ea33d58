"""What a caller gives to a step or an evaluation, cut into microbatches, and what each of them counts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gapless.model.capture import Captured, own_loss
from gapless.model.layers import Layers
from gapless.pipeline.options import Options
from gapless.stage import microbatch as mb
from gapless.stage.counted import Weighed, weighed


@dataclass(frozen=True)
class Minibatch:
    """The inputs and targets of the microbatches, and their sizes; a rank that has no use for some has None there."""

    inputs: Any
    target: Any
    parts: Sequence[Any]
    targets: Sequence[Any]
    sizes: Sequence[int]

    @classmethod
    def cut(cls, inputs: Any, target: Any, options: Options, *, needed: bool, trains: bool) -> "Minibatch":
        """`needed`: this process uses the inputs, whatever is in them."""
        size = mb.batch_size(inputs, options.batch_dims)
        count = min(size, options.microbatches)
        parts: list[Any] = [None] * count
        if needed or size == 0 or target is None:
            parts = mb.split(inputs, options.microbatches, options.batch_dims)
        targets: list[Any] = [None] * count
        if target is not None:
            targets = mb.split(target, count, options.target_dims, size=size)
        return cls(inputs, target, [apart(part) for part in parts] if trains else parts, targets, mb.sizes(size, count))

    def weighed(self, model: Layers | Captured, prepared: Sequence[Any], options: Options) -> Weighed:
        """What each microbatch counts."""
        if isinstance(model, Captured) and options.loss is own_loss:
            return model.weighed(prepared, self.inputs, self.sizes, options.loss_weight, self.parts)
        if self.target is None:
            return weighed(options.loss, options.loss_weight, self.sizes, self.parts, self.inputs)
        return weighed(options.loss, options.loss_weight, self.sizes, self.targets, self.target)


def apart(part: Any) -> Any:
    """Microbatches are views of one tensor and share its version counter: a layer that changes its input in place
    would make torch believe that those of all other microbatches have changed.
    """
    if part is None:
        return None
    tensors, shape = mb.flatten(part)
    return mb.unflatten([tensor.data.requires_grad_(tensor.requires_grad) for tensor in tensors], shape)


def scaled(weights: Sequence[float], scaler: Any, device: torch.device) -> Sequence[Tensor | float]:
    """The weights times the scale of a GradScaler, which is a power of two: the losses' other bits stay."""
    if scaler is None:
        return weights
    return [scaler.scale(torch.tensor(weight, device=device)) if weight else 0.0 for weight in weights]
