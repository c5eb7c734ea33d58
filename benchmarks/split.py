"""The host cost of splitting a backward, on tensors so small that nothing else is left to measure.

plain     F, then autograd's backward
gapless   F, I and W of a stage that defers its weight gradients
torch     F, then stage_backward_input and stage_backward_weight of torch.distributed.pipelining
"""

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from benchmarks.runner.outcome import Figure, of_rounds, quotients
from benchmarks.runner.parameters import Rounds, check_width
from benchmarks.runner.report import tabular
from benchmarks.runner.rounds import Progress, median, ratio, silent, take_turns
from gapless.stage.intra_op import intra_op_threads
from gapless.stage.stage import Stage
from gapless.zoo.gpt import Block

TARGET = 1.7
Parts = tuple[float, float]  # seconds of the forward, and of all that follows
Way = tuple[Callable[[Tensor], Any], Callable[[Tensor, Any, Tensor], None]]  # a forward, and a backward of its outputs


def run(
    *,
    width: Annotated[int, "width of the blocks, a multiple of 4"] = 32,
    samples: Annotated[int, "samples in a microbatch"] = 2,
    length: Annotated[int, "tokens in a sample of the GPT block"] = 4,
    times: Annotated[int, "repetitions in a round"] = 200,
    rounds: Rounds = 9,
    progress: Progress = silent,
) -> dict[str, Any]:
    """An MLP and a GPT block, each three ways, with one intra-op thread."""
    check_width(width)
    with intra_op_threads(1):
        blocks = {
            "mlp": (
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
                (samples, width),
            ),
            "gpt": (Block(width, heads=4), (samples, length, width)),
        }
        rows = [
            _row(name, block, torch.linspace(-1.0, 1.0, torch.Size(shape).numel()).view(shape), times, rounds, progress)
            for name, (block, shape) in blocks.items()
        ]
    return {"rows": rows, "target": TARGET}


def _row(name: str, block: nn.Module, x: Tensor, times: int, rounds: int, progress: Progress) -> dict[str, Any]:
    parts: dict[str, list[Parts]] = {"plain": [], "gapless": [], "torch": []}
    ways = {"plain": _plain(block), "gapless": _gapless(block), "torch": _torch(block)}
    contestants = {name: _repeated(way, x, times, parts[name]) for name, way in ways.items()}
    seconds = take_turns(contestants, rounds, lambda line: progress(f"{name}, {line}" if line else ""))
    counted = {way: values[-rounds:] for way, values in parts.items()}
    return {
        "block": name,
        "seconds": {way: median(values) for way, values in seconds.items()},
        "forward": {way: median([forward for forward, _ in values]) for way, values in counted.items()},
        "backward": {way: median([backward for _, backward in values]) for way, values in counted.items()},
        "ratio": ratio(seconds["gapless"], seconds["plain"]),
        "torch_ratio": ratio(seconds["torch"], seconds["plain"]),
        "rounds": seconds,
    }


def _repeated(way: Way, x: Tensor, times: int, parts: list[Parts]) -> Callable[[], float]:
    """The mean seconds of one F and its backward; what each of them took is noted in `parts`."""
    forward, backward = way

    def run() -> float:
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

    return run


def _plain(block: nn.Module) -> Way:
    return block, lambda inputs, outputs, grad: torch.autograd.backward(outputs, grad)


def _gapless(block: nn.Module) -> Way:
    stage = Stage([block], first_layer=0, split=True)
    steps = itertools.count()  # as in training: a stage looks closer in the first steps, and then ever more rarely

    def backward(inputs: Tensor, outputs: Any, grad: Tensor) -> None:
        stage.backward_input(0, [grad])
        stage.backward_weight(0)

    return lambda inputs: stage.forward(0, inputs, step=next(steps)), backward


def _torch(block: nn.Module) -> Way:
    def backward(inputs: Tensor, outputs: Any, grad: Tensor) -> None:
        _, groups = stage_backward_input([outputs], [grad], [inputs], block.parameters())
        stage_backward_weight(block.parameters(), groups)

    return block, backward


def report(found: dict[str, Any]) -> str:
    """A line for each block and way, with what the plain one takes as 1."""
    rows, rounds = [], len(found["rows"][0]["rounds"]["plain"])
    for row in found["rows"]:
        ratios = {"plain": 1.0, "gapless": row["ratio"], "torch": row["torch_ratio"]}
        for way, halves in (("plain", "F + B"), ("gapless", "F + I + W"), ("torch", "F + I + W")):
            parts = (row["forward"][way], row["backward"][way], row["seconds"][way])
            rows.append((row["block"], way, halves, *(f"{1e6 * part:.0f} us" for part in parts), f"{ratios[way]:.2f}"))
    return tabular(
        f"blocks of width {found['width']}, one thread, medians of {rounds} rounds of {found['times']}; "
        f"meant: at most {found['target']}",
        ("block", "by", "as", "forward", "backward", "all", "to plain"),
        rows,
        left=3,
    )


def figures(found: Mapping[str, Any]) -> list[Figure]:
    """What splitting costs, ours and torch's."""
    return [
        of_rounds(
            f"F + I + W to a plain F + B, {row['block']}, {by}",
            quotients(row["rounds"][by], row["rounds"]["plain"]),
            "x",
            "less",
            f"at most {found['target']}" if by == "gapless" else "",
            by,
        )
        for row in found["rows"]
        for by in ("gapless", "torch")
    ]
