"""A pipeline of a model with state, and the loop that its user would write: the same bits, and the same state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from tests.by_hand import seeded_loop

WIDTH, STEPS = 6, 5
Loss = Callable[[Any, Tensor], Tensor]
Made = tuple[Sequence[Any], Loss]


class Clock:
    """What a training script counts."""

    step = 0


def batches(microbatches: int = 4, numbered: bool = False, inner: Sequence[int] = ()) -> list[tuple[Tensor, Tensor]]:
    made, rows = torch.Generator().manual_seed(1), max(8, 2 * microbatches)
    x, y = (torch.randn(STEPS, rows, *inner, WIDTH, generator=made) for _ in range(2))
    for values in (x, y) if numbered else ():
        for number, part in enumerate(values.tensor_split(microbatches, 1)):
            part[:, :, 0] = number
    return list(zip(x, y, strict=True))


def left(layers: Sequence[Any], loss: Loss, losses: Sequence[Tensor], state: Callable[[Sequence[Any]], Any]) -> Any:
    parts = [each for each in (*layers, loss) if isinstance(each, nn.Module)]
    weights = list(dict.fromkeys(each for part in parts for each in part.parameters()))
    tensors = [
        *losses,
        *weights,
        *(each.grad for each in weights),
        *(each for part in parts for each in part.buffers()),
    ]
    return [None if each is None else each.detach().tolist() for each in tensors], state(layers)


def nothing(layers: Sequence[Any]) -> Any:
    return None


def assert_same_as_loop(
    make: Callable[[Clock], Made],
    *,
    microbatches: int = 4,
    steps: int = STEPS,
    state: Callable[[Sequence[Any]], Any] = nothing,
    optimize: bool = True,
    numbered: bool = False,
    inner: Sequence[int] = (),
    seed: int = 0,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    **options: Any,
) -> None:
    """After each step losses, weights, gradients, buffers and `state` are those of the loop. `numbered`: the first
    column of inputs and targets is the number of the microbatch. `inner`: dimensions between the first and the last.
    """
    found = []
    for piped in (False, True):
        torch.manual_seed(3)
        clock, seen = Clock(), list[Any]()
        layers, loss = make(clock)
        module = nn.ModuleList([each for each in layers if isinstance(each, nn.Module)])
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1) if optimize else None
        pipe = None
        if piped:
            options = {"devices": 2, "schedule": "1f1b", "seed": seed, **options}
            pipe = gapless.Pipeline(list(layers), microbatches=microbatches, loss=loss, intra_op_threads=1, **options)
        try:
            for clock.step, (x, y) in enumerate(batches(microbatches, numbered, inner)[:steps]):
                losses = []
                if pipe is not None:
                    with around():
                        losses = list(pipe.step(x, y).losses)
                else:
                    place: dict[str, Any] = {"microbatches": microbatches, "seed": seed, "step": clock.step}
                    losses = seeded_loop(layers, x, y, loss=loss, around=around, **place)
                seen.append(left(layers, loss, losses, state))
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()
        finally:
            if pipe is not None:
                pipe.close()
        found.append(seen)
    for step, (theirs, ours) in enumerate(zip(*found, strict=True)):
        assert ours == theirs, f"step {step}"


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


mse: Loss = F.mse_loss
