"""What a save in the background costs: a GPT trains with AdamW, and saves while it goes on. The stall is all time that
is added until the save has ended: steps with a save, from the call to the end of the step in which it has ended,
against as many steps without one, in turns.

example: python -m benchmarks saving --width 256
"""

import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch

from benchmarks.planner.subjects import small_gpt
from benchmarks.runner.findings import BenchmarkResult, cell, of_rounds, tabulated
from benchmarks.runner.parameters import Devices, Microbatches, Rounds
from benchmarks.runner.rounds import Progress, quotients, silent, timed
from gapless import Pipeline
from gapless.checkpoint import Checkpoints
from gapless.stage.intra_op import intra_op_threads

STALL, _TEMPORARY = 0.05, Path(tempfile.gettempdir())


def run(
    *,
    devices: Devices = 2,
    microbatches: Microbatches = 8,
    depth: Annotated[int, "blocks of the GPT"] = 7,
    width: Annotated[int, "its width"] = 512,
    samples: Annotated[int, "samples in a microbatch"] = 2,
    length: Annotated[int, "tokens in a sample"] = 128,
    rounds: Rounds = 7,
    folder: Annotated[Path, "save to a new folder in this one"] = _TEMPORARY,
    progress: Progress = silent,
) -> BenchmarkResult:
    """Each round saves once, and takes as many steps without a save, before it or after it. The times, and the stall as
    a share of a step.
    """
    torch.manual_seed(0)
    model = small_gpt(width, depth, 2048, length, heads=max(width // 64, 1), dropout=0.1)
    batch = model.batch(samples * microbatches)
    added, step, call = list[float](), list[float](), list[float]()
    with (
        intra_op_threads(1),
        tempfile.TemporaryDirectory(dir=folder) as place,
        Pipeline(list(model.layers), devices=devices, microbatches=microbatches, loss=model.loss) as pipe,
        Checkpoints(Path(place, "run"), pipe, keep=1, best=0) as checkpoints,
    ):
        optimizer = torch.optim.AdamW(pipe.parameters())

        def train() -> None:
            pipe.step(*batch)
            optimizer.step()
            optimizer.zero_grad()

        def saving() -> tuple[float, int]:
            start, count = time.perf_counter(), 0
            checkpoints.save(optimizer)
            call.append(time.perf_counter() - start)
            while checkpoints.under_way or not count:
                train()
                count += 1
            return time.perf_counter() - start, count

        progress("warm-up")
        timed(train, 2)()
        count = saving()[1]
        call.clear()
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            before = timed(train, count)() if number % 2 else None
            seconds, count = saving()
            step.append(timed(train, count)() if before is None else before)
            added.append(seconds - count * step[-1])
        checkpoints.wait()
        size = checkpoints.saved[-1].size
    weights = sum(each.nbytes for each in pipe.parameters())
    stalls = quotients(added, step)
    title = f"a GPT of {cell(weights, 'MiB.0')} on {devices} devices, {microbatches} microbatches, checkpoints of "
    title += f"{cell(size, 'MiB.0')}; medians of {rounds} rounds"
    rows = {"step": step, "call of save": call, "added until the save has ended": added}
    stall, target, *spread = (cell(each, "+%") for each in (stalls, STALL, *sorted(stalls)))
    verdict = f"stall {stall} of a step (target: below {target}); rounds: {', '.join(spread)}"
    table = tabulated(title, [{"": name, "time": taken} for name, taken in rows.items()], " | time:ms", verdict)
    name = "time a save in the background adds, of one step"
    figure = of_rounds(name, stalls, "share", "less", f"below {STALL:.0%}")
    return BenchmarkResult({"weights": weights, "size": size, **rows, "stalls": stalls}, [figure], [table])
