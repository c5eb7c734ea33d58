"""What the machinery costs where there is nothing to gain: one device, against the plain loop over microbatches.

example: python -m benchmarks overhead --depth 4
"""

from typing import Annotated, Any

import torch

from benchmarks.planner.subjects import small_gpt
from benchmarks.runner.findings import BenchmarkResult, duel, of_rounds
from benchmarks.runner.parameters import Microbatches, Rounds
from benchmarks.runner.rounds import Progress, fight, median, quotients, silent, timed
from gapless import Pipeline
from gapless.stage.batch.plain import plain_step
from gapless.stage.intra_op import intra_op_threads
from gapless.units import show_count


def run(
    *,
    depth: Annotated[int, "blocks of the GPT"] = 8,
    width: Annotated[int, "its width, a multiple of 4"] = 256,
    batch: Annotated[int, "sequences in a minibatch"] = 4,
    length: Annotated[int, "tokens in a sequence"] = 64,
    microbatches: Microbatches = 4,
    threads: Annotated[int, "intra-op threads of both"] = 1,
    rounds: Rounds = 11,
    progress: Progress = silent,
) -> BenchmarkResult:
    """The plain loop and a pipeline of one device on the same GPT; their losses are compared first, bit by bit."""
    with intra_op_threads(threads):
        model = small_gpt(width, depth, length=length)
        inputs, target = model.batch(batch)
        layers = list(model.layers)
        common: Any = {"loss": model.loss, "microbatches": microbatches}

        def plain() -> torch.Tensor:
            return plain_step(layers, inputs, target, **common).loss

        with Pipeline(layers, devices=["cpu"], intra_op_threads=threads, **common) as pipe:
            mine = pipe.step(inputs, target).loss
            assert mine is not None
            same = torch.equal(mine, plain())
            found = fight(timed(lambda: pipe.step(inputs, target)), "plain", timed(plain), rounds, progress)
    costs = quotients(found["rounds"]["gapless"], found["rounds"]["plain"])  # no gain
    parts, cores = show_count(microbatches, "microbatch"), show_count(threads, "thread")
    title = f"gpt of {show_count(depth, 'layer')}, width {width}, {batch} x {length} tokens, {parts}, {cores}, "
    title += "the same bits" if same else "DIFFERENT losses"
    figure = of_rounds("ratio to the plain loop", costs, "x", "less", "at most 1.03")
    return duel(title, {**found, "ratio": median(costs), "same_bits": same}, figure)
