"""What it costs to record a timeline, and whether it can be predicted: the schedule is simulated with the median times
of the recorded actions, and the makespan compared with the recorded one.

example: python -m benchmarks timeline --schedule zb-v --html timeline.html
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from benchmarks.peer.contest import Contest
from benchmarks.peer.gapless_sides import batch, pipeline, step
from benchmarks.runner.findings import BenchmarkResult, Figure, duel, of_rounds
from benchmarks.runner.parameters import Devices, Microbatches, Milliseconds, Rounds, Schedule, Steps
from benchmarks.runner.rounds import Progress, fight, silent
from gapless import costs_of, simulate
from gapless.view import page
from gapless.view.figures import Units


def run(
    *,
    schedule: Schedule = "zb-h1",
    devices: Devices = 4,
    microbatches: Microbatches = 16,
    milliseconds: Milliseconds = 1,
    steps: Steps = 5,
    rounds: Rounds = 15,
    html: Annotated[Path | None, "write a page with the predicted and the measured timeline"] = None,
    progress: Progress = silent,
) -> BenchmarkResult:
    """The same steps with and without recording, then some more whose timelines are looked at: simulated, and the one
    with the median makespan.
    """
    contest = Contest(devices, microbatches, "emulated", seconds=milliseconds / 1000)
    with pipeline(contest, schedule) as bare, pipeline(contest, schedule, timeline=True) as recorded:
        found = fight(step(contest, bare, steps), "recorded", step(contest, recorded, steps), rounds, progress)
        inputs, target = batch(contest)
        timelines: list[Any] = [recorded.step(inputs, target).timeline for _ in range(rounds)]
    costs = costs_of(timelines)
    middle = sorted(timelines, key=lambda timeline: timeline.makespan)[rounds // 2]
    predicted, measured = simulate(middle.schedule, costs, "predicted"), replace(middle, costs=costs, name="measured")
    if html:
        page.write(html, [predicted, measured], units=Units("s", "activations"), ranked=False)
    found |= {"predicted": float(predicted.makespan), "measured": float(measured.makespan)}
    found["difference"] = found["predicted"] / found["measured"] - 1
    title = f"{schedule}, {devices} emulated devices, {microbatches} microbatches, {milliseconds:g} ms for each F, I "
    title += f"and W, up to {max(map(len, middle.schedule.rows))} actions each"
    slower = [gain - 1 for gain in found["gains"]]
    cost = of_rounds("cost of recording", slower, "difference", "less", "below 1.0%")
    off = Figure("predicted to measured makespan", found["difference"], "difference", meant="within 5.0%")
    return duel(title, found, cost, off, ours="not recorded")
