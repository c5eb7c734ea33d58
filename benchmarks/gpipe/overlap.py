"""The optimizer step that does not wait, against the span of its schedule and against one that waits.

    span         of the schedule as it is run, simulated: what a step takes where nobody waits
    waits        pipe.step, clip_grad_norm_ and optimizer.step()
    overlapped   pipe.training, where nothing is clipped
    clipped      pipe.training, where every step is: it waits too

Devices are emulated: threads whose F, I and W take a given time and no processor.

example: python -m benchmarks overlap --devices 8 --microbatches 16
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from benchmarks.peer.contest import Contest
from benchmarks.peer.gapless_sides import batch, on_one_core, pipeline
from benchmarks.runner.findings import BenchmarkResult, of_rounds, tabulated
from benchmarks.runner.parameters import Devices, Microbatches, Milliseconds, Rounds, Schedules, Steps
from benchmarks.runner.rounds import Progress, median, quotients, silent, take_turns, timed
from gapless import Pipeline, simulate

_NEVER, _ALWAYS = 1e9, 1e-9  # norms to clip to


def run(
    *,
    schedules: Schedules = ("zb-h2", "auto"),
    devices: Devices = 8,
    microbatches: Microbatches = 16,
    milliseconds: Milliseconds = 5,
    steps: Steps = 8,
    rounds: Rounds = 5,
    progress: Progress = silent,
) -> BenchmarkResult:
    """All take turns, each with a pipeline of its own; `auto` may hold twice what 1f1b does. A row for each schedule
    and way. What counts is how far a step is above the span, and what clipping costs.
    """
    contest = Contest(devices, microbatches, "emulated", seconds=milliseconds / 1000)
    spans, contestants = {}, {}
    with ExitStack() as stack:
        for name in schedules:
            more: Any = {"objective": "span", "memory_limit": 2 * devices} if name == "auto" else {}
            for way, max_norm in (("waits", None), ("overlapped", _NEVER), ("clipped", _ALWAYS)):
                pipe = stack.enter_context(pipeline(contest, name, **more))
                spans[name] = float(simulate(pipe.schedule, contest.costs).span)
                with on_one_core():  # the threads start with the first step
                    contestants[f"{name} {way}"] = partial(_steadily, _training(pipe, contest, max_norm), steps)
        seconds = take_turns(contestants, rounds, progress)
    rows, figures = [], []
    for name, taken in seconds.items():
        schedule, _, way = name.partition(" ")
        shares = [each / spans[schedule] for each in taken]
        step = {"seconds": taken, "span": spans[schedule], "above": median(shares) - 1}
        rows.append({"schedule": schedule, "way": way, **step})
        if way == "overlapped":
            figures.append(of_rounds(f"step over span, {schedule}", shares, "x", "less", "at most 1.04"))
        if way == "clipped":
            shares = quotients(taken, seconds[f"{schedule} waits"])
            figures.append(of_rounds(f"clipped over waiting, {schedule}", shares, "x", "less", "at most 1.03"))
    table = tabulated(
        f"{contest.title()}; medians of {rounds}", rows, "schedule | way | step=seconds:ms | span:ms | above:%", left=2
    )
    return BenchmarkResult({"spans": spans, "rounds": seconds}, figures, [table])


def _steadily(step: Callable[[], object], steps: int) -> float:
    """Seconds per step. A step returns when the one before is settled, so the first ones only fill the pipeline."""
    for _ in range(2):
        step()
    return timed(step, steps)()


def _training(pipe: Pipeline, contest: Contest, max_norm: float | None) -> Callable[[], object]:
    """A step, after some that made the threads; without a norm it waits for its optimizer."""
    optimizer, (inputs, target) = torch.optim.SGD(pipe.parameters(), lr=0.0, momentum=0.9), batch(contest)
    training = None if max_norm is None else pipe.training(optimizer, max_norm=max_norm)

    def waiting() -> None:
        pipe.step(inputs, target)
        pipe.clip_grad_norm_(_NEVER)
        optimizer.step()
        optimizer.zero_grad()

    step = waiting if training is None else partial(training.step, inputs, target)
    for _ in range(1 if training is None else 3):
        step()
    return step
