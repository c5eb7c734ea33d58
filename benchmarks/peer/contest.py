"""What two contestants have in common: the same layers, the same inputs, the same loss."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.peer import llama
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
              llama: the same of a Llama, with its embedding, its head and its loss; a step ends with that of AdamW
    size      floats per sample, or per token; for linear layers and blocks their width
    samples   per microbatch
    tokens    per sample of a gpt or a llama
    precision of a llama: bf16, its weights; autocast, to bfloat16; fp16: autocast to float16
    compiled  layers are compiled
    """

    devices: int
    microbatches: int
    kind: Literal["emulated", "linear", "gpt", "llama"]
    seconds: float = 0.0
    size: int = 1
    samples: int = 1
    layers: int = 1
    tokens: int = 1
    precision: str = "bf16"
    compiled: bool = False

    def title(self, each: str = "") -> str:
        """Of emulated devices: what is run."""
        size = f" of {4 * self.size / 1e6:.2g} MB" if self.size >= 1000 else ""
        parts = f"{self.devices} emulated devices{each}, {self.microbatches} microbatches{size}"
        return f"{parts}, {1000 * self.seconds:g} ms for each F, I and W of a device"

    @property
    def on_gpu(self) -> bool:
        return self.kind in ("gpt", "llama")

    @property
    def device(self) -> torch.device:
        """Of the process that asks."""
        return torch.device("cuda", torch.cuda.current_device()) if self.on_gpu else torch.device("cpu")

    def settle(self) -> None:
        """Wait until the device has done what it was asked to."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def tidy(self) -> None:
        """Give back what the device has kept, for others on it."""
        if self.on_gpu:
            torch.cuda.empty_cache()

    @property
    def first_steps(self) -> int:
        """How many steps ours makes before it is measured: CUDA graphs are captured after some, and ranks compare their
        batches in the first eight.
        """
        return 8 if self.on_gpu or self.seconds < _SHORT else 0

    def stage(self, stages_per_device: int, separate: bool = False, number: int = 0) -> nn.Module:
        """`separate` is for a contestant that splits a backward by walking its graph: see Emulated."""
        if self.kind == "llama":
            last = self.devices * stages_per_device - 1
            part = llama.LlamaPart(self.llama(self.layers // stages_per_device), first=number == 0, last=number == last)
            if self.compiled:
                part.compile_layers()
            return part
        if self.kind == "linear":
            return nn.Sequential(*(nn.Linear(self.size, self.size) for _ in range(self.layers // stages_per_device)))
        if self.kind == "gpt":
            with self.device:  # made there, which is quicker by far
                blocks = [Block(self.size, self.size // 64) for _ in range(self.layers // stages_per_device)]
            return nn.Sequential(*blocks).to(torch.bfloat16)
        share = self.seconds / stages_per_device
        return Emulated(forward=share, input_grad=share, weight_grad=share, size=self.size, separate=separate)

    def llama(self, layers: int) -> nn.Module:
        """One of so many layers."""
        with self.device:
            made = llama.whole(self.size, layers, self.tokens)
        return made.to(torch.bfloat16) if self.precision == "bf16" else made

    def casting(self) -> AbstractContextManager[Any]:
        """Around a step."""
        if self.kind != "llama" or self.precision == "bf16":
            return contextlib.nullcontext()
        return torch.autocast("cuda", torch.float16 if self.precision == "fp16" else torch.bfloat16)

    def trained(
        self, parameters: Iterable[nn.Parameter], run: Callable[[], Any], *, in_place: bool = False
    ) -> Callable[[], Any]:
        """A step: `run`, and of a llama that of its optimizer. `in_place`: gradients stay where they are."""
        if self.kind != "llama":
            return run
        optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)

        def step() -> Any:
            with self.casting():
                result = run()
            optimizer.step()
            optimizer.zero_grad(set_to_none=not in_place)
            return result

        return step

    def inputs(self) -> Tensor:
        """They require a gradient where layers are emulated, so that the I of the first stage takes its time too."""
        shape = self._shape
        if self.kind == "llama":
            return torch.arange(math.prod(shape), device=self.device).view(shape) * 7919 % llama.VOCAB
        found = torch.linspace(-1.0, 1.0, math.prod(shape)).view(shape)
        return found.to(self.device, torch.bfloat16) if self.kind == "gpt" else found

    @property
    def _shape(self) -> tuple[int, ...]:
        if self.kind == "llama":
            return self.microbatches * self.samples, self.tokens
        tokens = (self.tokens,) if self.kind == "gpt" else ()
        return (self.microbatches * self.samples, *tokens, self.size)

    @property
    def inputs_need_grad(self) -> bool:
        return self.kind == "emulated"

    def target(self) -> Tensor:
        return self.inputs() if self.kind == "llama" else torch.zeros(self._shape[0], device=self.device)

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Where layers are emulated it looks at the first number of each sample, as they do, and leaves the rest alone;
        all the same its gradient has every number.
        """
        if self.kind == "llama":
            return llama.loss
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
