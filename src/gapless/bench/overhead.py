"""What the machinery costs where there is nothing to gain: one device, against the plain loop over microbatches."""

from typing import Any

import torch

from gapless.bench.rounds import Progress, median, ratio, silent, take_turns, timed
from gapless.pipeline.pipeline import Pipeline
from gapless.stage.intra_op import intra_op_threads
from gapless.stage.plain import plain_step
from gapless.zoo.gpt import gpt, next_token_loss

TARGET = 1.03


def run(
    *,
    depth: int,
    width: int,
    batch: int,
    length: int,
    microbatches: int,
    threads: int,
    rounds: int,
    progress: Progress = silent,
) -> dict[str, Any]:
    with intra_op_threads(threads):
        model = gpt(width=width, depth=depth, context=length)
        ids = torch.randint(256, (batch, length + 1), generator=torch.Generator().manual_seed(0))
        inputs, target = ids[:, :-1], ids[:, 1:]
        layers = list(model)
        with Pipeline(
            model, devices=["cpu"], microbatches=microbatches, loss=next_token_loss, intra_op_threads=threads
        ) as pipe:
            mine = pipe.step(inputs, target).loss
            plain = plain_step(layers, inputs, target, loss=next_token_loss, microbatches=microbatches).loss
            assert mine is not None
            contestants = {
                "gapless": timed(lambda: pipe.step(inputs, target)),
                "plain loop": timed(
                    lambda: plain_step(layers, inputs, target, loss=next_token_loss, microbatches=microbatches)
                ),
            }
            seconds = take_turns(contestants, rounds, progress)
    return {
        "benchmark": "overhead",
        "model": f"gpt of {depth} layers, width {width}",
        "batch": batch,
        "length": length,
        "microbatches": microbatches,
        "threads": threads,
        "seconds": median(seconds["gapless"]),
        "plain_seconds": median(seconds["plain loop"]),
        "ratio": ratio(seconds["gapless"], seconds["plain loop"]),
        "target": TARGET,
        "same_bits": torch.equal(mine, plain),
        "rounds": seconds,
    }


def report(found: dict[str, Any]) -> str:
    bits = "the same bits" if found["same_bits"] else "DIFFERENT losses"
    return "\n".join(
        [
            (
                f"{found['model']}, {found['batch']} x {found['length']} tokens, {found['microbatches']} microbatches, "
                f"{found['threads']} thread{'s' if found['threads'] != 1 else ''}, {bits}"
            ),
            "",
            f"pipeline of one device  {1000 * found['seconds']:8.1f} ms",
            f"plain loop              {1000 * found['plain_seconds']:8.1f} ms",
            f"ratio                   {found['ratio']:8.3f}  median of the rounds; meant: at most {found['target']}",
        ]
    )
