"""What is measured: layers as the stages of a pipeline, and one microbatch for them. The model stays as it is."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gapless.model.traced.piece import GraphLayer
from gapless.stage.batch import microbatch as mb
from gapless.stage.norm.running_statistics import BatchNorm
from gapless.stage.stage import Stage

Optimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Task:
    """What is measured: the layers, and one microbatch for them on the device; `optimizer` makes that of a layer."""

    layers: Sequence[Callable[..., Any]]
    inputs: Any
    target: Any
    loss: Callable[[Any, Any], Tensor] | None
    batchnorm: BatchNorm
    device: torch.device
    optimizer: Optimizer | None

    def stage(self, layers: Sequence[Any], number: int, **more: Any) -> Stage:
        """One that begins with layer `number`."""
        last = number + len(layers) == len(self.layers)
        loss = self.loss if last else None
        # A layer of a traced graph asks the one stage it was given to.
        layers = [copy.copy(layer) if isinstance(layer, GraphLayer) else layer for layer in layers]
        return Stage(layers, first_layer=number, loss=loss, spread=number == 0, batchnorm=self.batchnorm, **more)


def copied(layer: Any, device: torch.device) -> Any:
    """A layer of its own on the device. Without data it gets some, which take as long as any other."""
    if not isinstance(layer, nn.Module):
        return layer
    tensors = [*layer.parameters(), *layer.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        made = copy.deepcopy(layer).to(device)
        made.zero_grad()
        return made
    made = copy.deepcopy(layer).to_empty(device=device)
    generator = torch.Generator(device)  # what the program draws itself stays as it was
    with torch.no_grad():
        for tensor in chain(made.parameters(), made.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(std=0.02, generator=generator) if tensor.dim() > 1 else tensor.fill_(1.0)
            else:
                tensor.zero_()
    return made


def remade(tree: Any, make: Callable[[Tensor], Tensor]) -> Any:
    """A tree with others in the places of its tensors, cut off from what made them."""
    if tree is None:
        return None
    tensors, shape = mb.flatten(tree)
    return mb.unflatten([make(each.detach()).requires_grad_(each.requires_grad) for each in tensors], shape)


def moved(tree: Any, device: torch.device) -> Any:
    """The same on the device."""
    return remade(tree, lambda tensor: tensor.to(device))


def ones_like_outputs(outputs: Any) -> list[Tensor | None]:
    """Gradients to begin a backward with: their values do not change what it takes."""
    return [torch.ones_like(tensor) if tensor.requires_grad else None for tensor in mb.flatten(outputs)[0]]
