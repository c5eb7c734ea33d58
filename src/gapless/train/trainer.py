"""The loop: a batch, a step of the pipeline, a step of the optimizer, and what came of it, one after the other."""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from gapless.errors import GaplessError
from gapless.pipeline.pipeline import Pipeline
from gapless.stage import microbatch as mb
from gapless.train import user_code as own
from gapless.train.data import Batch, with_shape


class NotFiniteError(GaplessError):
    """The loss is no number any more."""


@dataclass(frozen=True)
class Step:
    """What a step left: `number` counts from 1, `seconds` is the step with its update, `waited` for the batch."""

    number: int
    loss: float
    samples: int
    seconds: float
    waited: float


def train(
    pipe: Pipeline, optimizer: torch.optim.Optimizer, batches: Iterable[Batch], *, steps: int, clip: float | None = None
) -> Iterator[Step]:
    """So many steps. A loss that is not finite ends it, before the weights take it in."""
    source = iter(batches)
    for number in range(1, steps + 1):
        begin = time.perf_counter()
        inputs, target = next(source)
        come = time.perf_counter()
        with own.told(f"step {number}{with_shape((inputs, target))}"):
            result = pipe.step(inputs, target)
        assert result.loss is not None  # a step has one, or fails
        loss = float(result.loss)
        if not math.isfinite(loss):
            raise NotFiniteError(f"the loss of step {number} is {loss}; a smaller learning rate or clip = 1.0 may help")
        with own.told(f"the update of step {number} with {type(optimizer).__name__}"):
            if clip is not None:
                pipe.clip_grad_norm_(clip)
            optimizer.step()
            optimizer.zero_grad()
        yield Step(number, loss, mb.batch_size(inputs), time.perf_counter() - come, come - begin)
