"""Is a simulated timeline worth looking at? Measure what each stage's actions take, simulate the same schedule with
these costs, and compare the makespans.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gapless.bench.emulated import pipeline
from gapless.bench.peer.contest import Contest
from gapless.bench.rounds import Progress, silent
from gapless.pipeline.pipeline import Pipeline
from gapless.schedule.calibration import costs_of
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline
from gapless.view import page, text
from gapless.zoo.gpt import gpt, next_token_loss

TARGET = 0.05


def run(
    *,
    model: str,
    schedules: Sequence[str],
    devices: int,
    microbatches: int,
    milliseconds: float,
    rounds: int,
    html: str | None,
    progress: Progress = silent,
) -> dict[str, Any]:
    rows, shown = [], []
    for name in schedules:
        progress(f"{name} on {model}")
        pipe, inputs, target = _subject(model, name, devices, microbatches, milliseconds)
        with pipe:
            timelines = _measured(pipe, inputs, target, rounds)
        row, pair = _compared(name, timelines)
        rows.append(row)
        shown += pair
    progress("")
    if html:
        page.write(html, shown, title=f"Predicted and measured: {model}")
    return {
        "benchmark": "prediction",
        "model": model,
        "devices": devices,
        "microbatches": microbatches,
        "rows": rows,
        "target": TARGET,
        "html": html,
    }


def _subject(
    model: str, schedule: str, devices: int, microbatches: int, milliseconds: float
) -> tuple[Pipeline, Tensor, Tensor]:
    if model == "emulated":
        contest = Contest(devices, microbatches, "emulated", seconds=milliseconds / 1000)
        inputs = contest.inputs().requires_grad_()
        return pipeline(contest, schedule, timeline=True), inputs, contest.target()
    ids = torch.randint(256, (2 * microbatches, 65), generator=torch.Generator().manual_seed(0))
    pipe = Pipeline(
        gpt(width=128, depth=4 * devices, context=64),
        devices=["cpu"] * devices,
        microbatches=microbatches,
        loss=next_token_loss,
        schedule=schedule,
        timeline=True,
    )
    return pipe, ids[:, :-1], ids[:, 1:]


def _measured(pipe: Pipeline, inputs: Tensor, target: Tensor, rounds: int) -> list[Timeline]:
    found = []
    for number in range(rounds + 1):
        timeline = pipe.step(inputs, target).timeline
        assert timeline is not None
        if number > 0:
            found.append(timeline)
    return found


def _compared(name: str, timelines: Sequence[Timeline]) -> tuple[dict[str, Any], list[Timeline]]:
    costs = costs_of(timelines)
    predicted = simulate(timelines[0].schedule, costs, f"{name}, predicted")
    middle = sorted(timelines, key=lambda timeline: timeline.makespan)[len(timelines) // 2]
    measured = statistics.median(float(timeline.makespan) for timeline in timelines)
    row = {
        "schedule": name,
        "predicted": float(predicted.makespan),
        "measured": measured,
        "difference": abs(measured - float(predicted.makespan)) / measured,
        "predicted_bubble": float(predicted.bubble),
        "measured_bubble": float(middle.bubble),
        "rounds": [float(timeline.makespan) for timeline in timelines],
    }
    return row, [predicted, replace(middle, costs=costs, name=f"{name}, measured")]


def report(found: dict[str, Any]) -> str:
    headings = ("schedule", "predicted", "measured", "difference", "bubble predicted", "measured")
    rows = [
        (
            row["schedule"],
            f"{1000 * row['predicted']:.1f} ms",
            f"{1000 * row['measured']:.1f} ms",
            text.percent(row["difference"]),
            text.percent(row["predicted_bubble"]),
            text.percent(row["measured_bubble"]),
        )
        for row in found["rows"]
    ]
    lines = [
        (
            f"{found['model']}, {found['devices']} devices, {found['microbatches']} microbatches, medians of "
            f"{len(found['rows'][0]['rounds'])} steps; meant: a difference below {text.percent(found['target'])}"
        ),
        "",
        text.table(headings, rows),
    ]
    if found["html"]:
        lines += ["", f"both timelines: {found['html']}"]
    return "\n".join(lines)
