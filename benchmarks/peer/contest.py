"""What two contestants have in common: the same layers, the same inputs, the same loss."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gapless.schedule.costs import Costs
from gapless.zoo.emulated import Emulated
from gapless.zoo.gpt import Block

_SHORT = 0.002  # seconds of an action: what a step has to do besides them counts


@dataclasses.dataclass(frozen=True)
class Contest:
    """A model cut into equal stages, and a minibatch for it.

    kind      emulated: a stage is one layer; those of a device take `seconds` together for each of F, I and W
              linear: a device has `layers` linear ones
              gpt: a device has `layers` blocks, on a GPU and in bfloat16
    size      floats per sample, or per token; for linear layers and blocks their width
    samples   per microbatch
    tokens    per sample of a gpt
    """

    devices: int
    microbatches: int
    kind: Literal["emulated", "linear", "gpt"]
    seconds: float = 0.0
    size: int = 1
    samples: int = 1
    layers: int = 1
    tokens: int = 1

    @property
    def device(self) -> torch.device:
        """Of the process that asks."""
        return torch.device("cuda", torch.cuda.current_device()) if self.kind == "gpt" else torch.device("cpu")

    def settle(self) -> None:
        """Wait until the device has done what it was asked to."""
        if self.kind == "gpt":
            torch.cuda.synchronize()

    def tidy(self) -> None:
        """Give back what the device has kept, for others on it."""
        if self.kind == "gpt":
            torch.cuda.empty_cache()

    @property
    def first_steps(self) -> int:
        """How many steps ours makes before it is measured: CUDA graphs are captured after some, and ranks compare their
        batches in the first eight.
        """
        return 8 if self.kind == "gpt" or self.seconds < _SHORT else 0

    def stage(self, stages_per_device: int, separate: bool = False) -> nn.Module:
        """`separate` is for a contestant that splits a backward by walking its graph: see Emulated."""
        if self.kind == "linear":
            return nn.Sequential(*(nn.Linear(self.size, self.size) for _ in range(self.layers // stages_per_device)))
        if self.kind == "gpt":
            with self.device:  # made there, which is quicker by far
                blocks = [Block(self.size, self.size // 64) for _ in range(self.layers // stages_per_device)]
            return nn.Sequential(*blocks).to(torch.bfloat16)
        share = self.seconds / stages_per_device
        return Emulated(forward=share, input_grad=share, weight_grad=share, size=self.size, separate=separate)

    def inputs(self) -> Tensor:
        """They require a gradient where layers are emulated, so that the I of the first stage takes its time too."""
        shape = self._shape
        found = torch.linspace(-1.0, 1.0, math.prod(shape)).view(shape)
        return found.to(self.device, torch.bfloat16) if self.kind == "gpt" else found

    @property
    def _shape(self) -> tuple[int, ...]:
        tokens = (self.tokens,) if self.kind == "gpt" else ()
        return (self.microbatches * self.samples, *tokens, self.size)

    @property
    def inputs_need_grad(self) -> bool:
        return self.kind == "emulated"

    def target(self) -> Tensor:
        return torch.zeros(self._shape[0], device=self.device)

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Where layers are emulated it looks at the first number of each sample, as they do, and leaves the rest alone;
        all the same its gradient has every number.
        """
        return _sum_of_first if self.kind == "emulated" and self.size > 1 else loss

    @property
    def costs(self) -> Costs:
        return Costs(forward=self.seconds, input_grad=self.seconds, weight_grad=self.seconds)


def loss(outputs: Tensor, target: Tensor) -> Tensor:
    """As light as can be, since it is not what is to be measured, but for a gradient of which every number is there:
    that of a bare sum is one number, spread, and would cross between processes as one.
    """
    return (outputs * 1.0).sum()


class _SumOfFirst(torch.autograd.Function):
    """Of the first number of each sample."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor) -> Tensor:
        ctx.shape = outputs.shape
        return outputs[:, 0].sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _first_numbers(ctx.shape, grads[0].item())


@functools.cache
def _first_numbers(shape: tuple[int, ...], value: float) -> Tensor:
    """Made once: nobody changes a gradient, and to fill memory takes a processor."""
    made = torch.zeros(shape)
    made[:, 0] = value
    return made


def _sum_of_first(outputs: Tensor, target: Tensor) -> Tensor:
    found: Tensor = _sum_of_first_numbers(outputs)
    return found


_sum_of_first_numbers: Any = _SumOfFirst.apply
