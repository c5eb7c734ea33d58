"""Schedules without an end, pipedream and 2bw, in their steady state: how busy a stream keeps its devices.

What M microbatches take there stands for a step, less what updates and copies of weights take of a processor: while it
makes them a device is busy too. No device can do the rest in less than its own F, I and W, which are the bound. All
devices are equally busy, since all do the same. Backwards are split, so that a gradient leaves before those of the
weights are computed.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peer.contest import Contest
from benchmarks.runner.rounds import Span, median
from gapless.pipeline.pipeline import Pipeline
from gapless.schedule.recipes import find_recipe


def has_steps(schedule: str) -> bool:
    """Or it has no end."""
    return find_recipe(schedule).synchronous


def steadily(contest: Contest, pipe: Pipeline, inputs: Tensor, target: Tensor) -> Callable[[], Span]:
    """Goes on with a stream for a while, and then for as many microbatches as a step has: these are the span."""
    if pipe.microbatches == 1:
        inputs, target = inputs[: contest.samples], target[: contest.samples]
    stream = pipe.stream(optimizer=_sgd, split=True)
    results = stream.run(itertools.repeat((inputs, target)))

    def run() -> Span:  # which also keeps the pipeline
        count, depth = (-(-each // pipe.microbatches) for each in (contest.microbatches, contest.devices))
        for _ in range(3 * depth + 2):  # what the last turn has left under way, and until devices are busy again
            next(results)
        start, updates = time.perf_counter(), sum(stream.update_seconds)
        for _ in range(count):
            next(results)
        updates = (sum(stream.update_seconds) - updates) / len(stream.update_seconds)
        return Span(start + updates, time.perf_counter())

    return run


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def steady_figures(contest: Contest, seconds: Sequence[float]) -> dict[str, Any]:
    """As of a step."""
    work = 3 * contest.seconds * contest.microbatches
    busy = work / median(seconds)
    nothing = dict.fromkeys(("fused", "split", "backwards"), 0)
    return {"seconds": median(seconds), "bound": work, "efficiency": busy, "useful": busy, **nothing, "rounds": seconds}
