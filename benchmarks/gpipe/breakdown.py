"""Where the time of a step goes, as measured, in the parts of the GPipe paper.

|-- compute --|- recompute -|- imbalance -|- bubble -|- transfer -|- set-up -|- update -|

    compute     the time of forwards and backwards, had each device an equal share; from the recorded timeline
    recompute   the same of recomputes
    imbalance   what the busiest device has on top of its share
    bubble      what it waits for by the schedule alone: the order simulated with the times that its actions took
    transfer    what it waits besides: messages on their way, threads that wake up, actions slower than their median
    set-up      what a step takes before its first action and after its last one
    update      the optimizer step

A small GPT runs on 2 devices, threads of this process with a core each, and emulated devices stand for more. A step is
the median of the rounds.

example: python -m benchmarks breakdown --devices 4
"""

import time
from typing import Annotated, Any

import torch
from torch import Tensor

from benchmarks.peer.contest import Contest
from benchmarks.peer.gapless_sides import batch, pipeline
from benchmarks.planner.subjects import small_gpt
from benchmarks.runner.findings import BenchmarkResult, Found, of_rounds, tabulated
from benchmarks.runner.parameters import Milliseconds, Rounds
from benchmarks.runner.rounds import Progress, quotients, silent
from gapless import Pipeline, Timeline, costs_of, simulate
from gapless.schedule.action import Kind
from gapless.stage.intra_op import intra_op_threads

PARTS = ("compute", "recompute", "imbalance", "bubble", "transfer", "set-up", "update")


def run(
    *,
    width: Annotated[int, "width of the GPT, a multiple of 4"] = 128,
    depth: Annotated[int, "its blocks"] = 8,
    tokens: Annotated[int, "in a sequence"] = 64,
    microbatches: Annotated[int, "microbatches"] = 8,
    devices: Annotated[int, "emulated devices"] = 8,
    milliseconds: Milliseconds = 5.0,
    rounds: Rounds = 7,
    progress: Progress = silent,
) -> BenchmarkResult:
    """A row for each setting: its step, and the median of each part as a share of it."""
    rows = []
    for schedule, remat in (("gpipe", "stage"), ("1f1b", "none"), ("zb-h1", "none")):
        progress(f"gpt, {schedule}")
        torch.manual_seed(0)
        model = small_gpt(width, depth, length=tokens)
        made: Any = {"schedule": schedule, "remat": remat, "microbatches": microbatches, "timeline": True}
        with intra_op_threads(1), Pipeline(model.layers, devices=["cpu"] * 2, loss=model.loss, **made) as pipe:
            steps = _steps(pipe, torch.optim.AdamW(pipe.parameters()), model.batch(microbatches), rounds)
        rows.append({"model": "gpt, 2 devices", "schedule": schedule, "remat": remat, **steps})
    for schedule in ("gpipe", "1f1b", "zb-v"):
        progress(f"emulated, {schedule}")
        contest = Contest(devices, microbatches, "emulated", seconds=milliseconds / 1000)
        with pipeline(contest, schedule, timeline=True) as pipe:
            steps = _steps(pipe, torch.optim.SGD(pipe.parameters(), lr=0.0), batch(contest), rounds)
        rows.append({"model": f"emulated, {devices} devices", "schedule": schedule, "remat": "none", **steps})
    figures = []
    for row in rows:
        row |= {part: quotients([each[part] for each in row["parts"]], row["steps"]) for part in PARTS}
        name = f"{row['model']}, {row['schedule']}"
        figures += [of_rounds(f"{name}: step", row["steps"]), of_rounds(f"{name}: bubble", row["bubble"], "share")]
    note = "Medians of the rounds, each part by itself, so they need not add up to 100%."
    columns = " | ".join(("model | schedule | remat | step=steps:ms", *(f"{part}:%" for part in PARTS)))
    table = tabulated("Where the time of a step goes, measured", rows, columns, note=note, left=3, in_docs=True)
    return BenchmarkResult({"rows": rows}, figures, [table])


def _steps(pipe: Pipeline, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], rounds: int) -> Found:
    """The seconds of steps with their updates, and the parts of each; two more come first."""
    recorded: list[tuple[Any, float, float]] = []  # timelines, and the seconds of the step and of the update
    for _ in range(2 + rounds):
        start = time.perf_counter()
        timeline = pipe.step(*batch).timeline
        middle = time.perf_counter()
        optimizer.step()
        recorded.append((timeline, middle - start, time.perf_counter() - middle))
        optimizer.zero_grad()
    costs = costs_of([timeline for timeline, *_ in recorded[2:]])
    parts = [parts_of(*each, costs) for each in recorded[2:]]
    return {"parts": parts, "steps": [seconds + update for _, seconds, update in recorded[2:]]}


def parts_of(timeline: Timeline, seconds: float, update: float, costs: Any) -> dict[str, float]:
    """Of one step, which together are the step; `costs` are the median times of all steps."""
    devices = timeline.schedule.num_devices
    busy = [float(each) for each in timeline.busy]
    again = sum(float(end - start) for action, start, end in timeline.all_spans if action.kind is Kind.RECOMPUTE)
    ideal = simulate(timeline.schedule, costs)
    waits = float(timeline.makespan) - max(busy)
    bubble = min(waits, float(ideal.makespan - ideal.work))
    return {
        "compute": sum(busy) / devices - again / devices,
        "recompute": again / devices,
        "imbalance": max(busy) - sum(busy) / devices,
        "bubble": bubble,
        "transfer": waits - bubble,
        "set-up": seconds - float(timeline.makespan),
        "update": update,
    }
