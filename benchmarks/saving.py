"""What a save in the background costs: a GPT trains with AdamW, and saves while it goes on. The stall is all time that
is added until the save has ended: steps with a save, from the call to the end of the step in which it has ended,
against as many steps without one, in turns.
"""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch

from benchmarks.runner.outcome import Figure, of_rounds
from benchmarks.runner.parameters import Devices, Microbatches, Rounds, check_width
from benchmarks.runner.report import mebibytes, milliseconds, signed, tabular
from benchmarks.runner.rounds import Progress, median, silent
from gapless.checkpoint import Checkpoints
from gapless.pipeline.pipeline import Pipeline
from gapless.zoo.gpt import gpt, next_token_loss

STALL = 0.05
_VOCAB = 2048


def run(
    *,
    devices: Devices = 2,
    microbatches: Microbatches = 8,
    depth: Annotated[int, "blocks of the GPT"] = 7,
    width: Annotated[int, "its width"] = 512,
    samples: Annotated[int, "samples in a microbatch"] = 2,
    length: Annotated[int, "tokens in a sample"] = 128,
    rounds: Rounds = 7,
    folder: Annotated[Path | None, "save to a new folder in this one; by default where temporary files go"] = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Each round saves once, and takes as many steps without a save, before it or after it."""
    torch.manual_seed(0)
    heads = max(width // 64, 1)
    check_width(width, heads)
    model = gpt(vocab=_VOCAB, width=width, depth=depth, heads=heads, context=length, dropout=0.1)
    batch = torch.randint(_VOCAB, (samples * microbatches, length + 1))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    added, step, call, took = [], [], [], []
    try:
        with (
            tempfile.TemporaryDirectory(dir=folder) as place,
            Pipeline(model, devices=devices, microbatches=microbatches, loss=next_token_loss) as pipe,
            Checkpoints(Path(place, "run"), pipe, keep=1, best=0) as checkpoints,
        ):
            optimizer = torch.optim.AdamW(pipe.parameters())

            def steps(count: int) -> float:
                start = time.perf_counter()
                for _ in range(count):
                    pipe.step(batch[:, :-1], batch[:, 1:])
                    optimizer.step()
                    optimizer.zero_grad()
                return time.perf_counter() - start

            def saving() -> tuple[float, int]:
                start, count = time.perf_counter(), 0
                checkpoints.save(optimizer)
                call.append(time.perf_counter() - start)
                while checkpoints.under_way or not count:
                    steps(1)
                    count += 1
                took.append(time.perf_counter() - start)
                return took[-1], count

            progress("warm-up")
            steps(2)
            count = saving()[1]
            call.clear()
            for number in range(rounds):
                progress(f"round {number + 1} of {rounds}")
                before = steps(count) / count if number % 2 else None
                seconds, count = saving()
                plain = steps(count) / count if before is None else before
                step.append(plain)
                added.append(seconds - count * plain)
            checkpoints.wait()
            size = checkpoints.saved[-1].size
            progress("")
    finally:
        torch.set_num_threads(threads)
    weights = sum(each.numel() * each.element_size() for each in model.parameters())
    return {
        "weights": weights,
        "size": size,
        "step": median(step),
        "call": median(call),
        "added": median(added),
        "stall": median([extra / plain for extra, plain in zip(added, step, strict=True)]),
        "stalls": [extra / plain for extra, plain in zip(added, step, strict=True)],
        "stall_target": STALL,
    }


def report(found: dict[str, Any]) -> str:
    """The times, and the stall as a share of a step."""
    title = (
        f"a GPT of {mebibytes(found['weights'], 0)} on {found['devices']} devices, {found['microbatches']} "
        f"microbatches, checkpoints of {mebibytes(found['size'], 0)}; medians of {len(found['stalls'])} rounds"
    )
    rows = [
        ["step", milliseconds(found["step"])],
        ["call of save", milliseconds(found["call"])],
        ["added until the save has ended", milliseconds(found["added"])],
    ]
    spread = ", ".join(signed(each) for each in sorted(found["stalls"]))
    verdict = (
        f"stall {signed(found['stall'])} of a step (target: below {signed(found['stall_target'])}); rounds: {spread}"
    )
    return tabular(title, ["", "time"], rows, verdict)


def figures(found: Mapping[str, Any]) -> list[Figure]:
    """The stall of a save in the background."""
    meant = f"below {found['stall_target']:.0%}"
    return [of_rounds("time a save in the background adds, of one step", found["stalls"], "share", "less", meant)]
