"""The host cost of splitting a backward, on tensors so small that nothing else is left to measure.

plain     F, then autograd's backward
gapless   F, I and W of a stage that defers its weight gradients
torch     F, then stage_backward_input and stage_backward_weight of torch.distributed.pipelining

example: python -m benchmarks split --width 64
"""

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from benchmarks.runner.findings import BenchmarkResult, of_rounds, tabulated
from benchmarks.runner.parameters import Rounds, check_width
from benchmarks.runner.rounds import Progress, median, quotients, silent, take_turns, within
from gapless.stage.intra_op import intra_op_threads
from gapless.stage.stage import Stage
from gapless.zoo.gpt import Block

TARGET = 1.7
Parts = tuple[float, float]  # seconds of the forward, and of all that follows
Forward = Callable[[Tensor], Any]
Backward = Callable[[Tensor, Any, Tensor], None]  # of inputs, outputs and their gradient


def run(
    *,
    width: Annotated[int, "width of the blocks, a multiple of 4"] = 32,
    samples: Annotated[int, "samples in a microbatch"] = 2,
    length: Annotated[int, "tokens in a sample of the GPT block"] = 4,
    times: Annotated[int, "repetitions in a round"] = 200,
    rounds: Rounds = 9,
    progress: Progress = silent,
) -> BenchmarkResult:
    """An MLP and a GPT block, each three ways, with one intra-op thread. A line for each, with what the plain one takes
    as 1; what splitting costs, ours and torch's.
    """
    check_width(width)
    rows, figures = [], []
    with intra_op_threads(1):
        mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        blocks = {"mlp": (mlp, (samples, width)), "gpt": (Block(width, heads=4), (samples, length, width))}
        for name, (block, shape) in blocks.items():
            x = torch.linspace(-1.0, 1.0, torch.Size(shape).numel()).view(shape)
            ways = _ways(block)
            parts: dict[str, list[Parts]] = {way: [] for way in ways}
            contestants = {way: partial(_repeated, *ways[way], x, times, parts[way]) for way in ways}
            seconds = take_turns(contestants, rounds, within(progress, name))
            for way, taken in seconds.items():
                to_plain, halves = quotients(taken, seconds["plain"]), "F + B" if way == "plain" else "F + I + W"
                row = {"block": name, "by": way, "as": halves, "seconds": taken, "ratio": f"{median(to_plain):.2f}"}
                forward, backward = ([*each] for each in zip(*parts[way][-rounds:], strict=True))
                rows.append({**row, "forward": forward, "backward": backward})
                if way != "plain":
                    meant = f"at most {TARGET}" if way == "gapless" else ""
                    figure = f"F + I + W to a plain F + B, {name}, {way}"
                    figures.append(of_rounds(figure, to_plain, "x", "less", meant, way))
    title = f"blocks of width {width}, one thread, medians of {rounds} rounds of {times}; meant: at most {TARGET}"
    columns = "block | by | as | forward:us | backward:us | all=seconds:us | to plain=ratio"
    return BenchmarkResult({"rows": rows}, figures, [tabulated(title, rows, columns, left=3)])


def _repeated(forward: Forward, backward: Backward, x: Tensor, times: int, parts: list[Parts]) -> float:
    """The mean seconds of one F and its backward; what each of them took is noted in `parts`."""
    grad, sums = torch.ones_like(x), [0.0, 0.0]
    for _ in range(times):
        inputs = x.detach().requires_grad_()
        start = time.perf_counter()
        outputs = forward(inputs)
        middle = time.perf_counter()
        backward(inputs, outputs, grad)
        sums[1] += time.perf_counter() - middle
        sums[0] += middle - start
        del outputs  # here, where nobody counts
    parts.append((sums[0] / times, sums[1] / times))
    return sum(sums) / times


def _ways(block: nn.Module) -> dict[str, tuple[Forward, Backward]]:
    stage = Stage([block], first_layer=0, split=True)
    steps = itertools.count()  # as in training: a stage looks closer in the first steps, and then ever more rarely

    def ours(inputs: Tensor, outputs: Any, grad: Tensor) -> None:
        stage.backward_input(0, [grad])
        stage.backward_weight(0)

    def theirs(inputs: Tensor, outputs: Any, grad: Tensor) -> None:
        _, groups = stage_backward_input([outputs], [grad], [inputs], block.parameters())
        stage_backward_weight(block.parameters(), groups)

    return {
        "plain": (block, lambda inputs, outputs, grad: torch.autograd.backward(outputs, grad)),
        "gapless": (lambda inputs: stage.forward(0, inputs, step=next(steps)), ours),
        "torch": (block, theirs),
    }
