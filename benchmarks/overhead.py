"""What the machinery costs where there is nothing to gain: one device, against the plain loop over microbatches.

example: python -m benchmarks overhead --depth 4
"""

from typing import Annotated, Any

import torch

from benchmarks.planner.subjects import small_gpt
from benchmarks.runner.parameters import Microbatches, Rounds
from benchmarks.runner.rounds import Progress, fight, quotients, ratio, silent, timed
from benchmarks.runner.told import Found, Told, of_rounds, told_duel
from gapless.pipeline.pipeline import Pipeline
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
) -> Found:
    """The plain loop and a pipeline of one device on the same GPT; their losses are compared first."""
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
    found["ratio"] = ratio(found["rounds"]["gapless"], found["rounds"]["plain"])  # a cost, and no gain
    return found | {"same_bits": same, "target": 1.03}


def told(found: Found) -> Told:
    """Both times and their ratio, under whether the losses were bit-identical."""
    costs = quotients(found["rounds"]["gapless"], found["rounds"]["plain"])
    bits = "the same bits" if found["same_bits"] else "DIFFERENT losses"
    counts = {"depth": "layer", "microbatches": "microbatch", "threads": "thread"}
    layers, parts, threads = (show_count(found[key], word) for key, word in counts.items())
    title = f"gpt of {layers}, width {{width}}, {{batch}} x {{length}} tokens, {parts}, {threads}, {bits}"
    figure = of_rounds("ratio to the plain loop", costs, "x", "less", f"at most {found['target']}")
    return told_duel(title, found, figure)
