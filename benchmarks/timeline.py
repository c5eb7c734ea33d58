"""What it costs to record a timeline, and whether it can be predicted: the schedule is simulated with the median times
of the recorded actions, and the makespan compared with the recorded one.

example: python -m benchmarks timeline --schedule zb-v --html timeline.html
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from benchmarks.peer.contest import Contest
from benchmarks.peer.gapless_sides import batch, pipeline, step
from benchmarks.runner.parameters import Devices, Microbatches, Milliseconds, Rounds, Schedule, Steps
from benchmarks.runner.rounds import Progress, fight, quotients, silent
from benchmarks.runner.told import Figure, Found, Told, of_rounds, told_duel
from gapless import Timeline, costs_of, simulate
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
) -> Found:
    """The same steps with and without recording, then some more whose timelines are looked at."""
    contest = Contest(devices, microbatches, "emulated", seconds=milliseconds / 1000)
    with pipeline(contest, schedule) as bare, pipeline(contest, schedule, timeline=True) as recorded:
        found = fight(step(contest, bare, steps), "recorded", step(contest, recorded, steps), rounds, progress)
        inputs, target = batch(contest)
        timelines = [recorded.step(inputs, target).timeline for _ in range(rounds)]
    predicted, measured = _pair([timeline for timeline in timelines if timeline is not None])
    if html:
        page.write(html, [predicted, measured], units=Units("s", "activations"), ranked=False)
    made = {"predicted": float(predicted.makespan), "measured": float(measured.makespan)}
    off, most = made["predicted"] / made["measured"] - 1, max(map(len, bare.schedule.rows))
    targets = {"cost_target": 0.01, "difference_target": 0.05}
    return {**found, **made, "cost": found["ratio"] - 1, "difference": off, "actions_per_device": most, **targets}


def _pair(timelines: list[Timeline]) -> tuple[Timeline, Timeline]:
    """As simulated, and the one with the median makespan."""
    costs = costs_of(timelines)
    middle = sorted(timelines, key=lambda timeline: timeline.makespan)[len(timelines) // 2]
    return simulate(middle.schedule, costs, "predicted"), replace(middle, costs=costs, name="measured")


def told(found: Found) -> Told:
    """Both times, what the recording costs, and how far the simulation is off."""
    costs = [cost - 1 for cost in quotients(found["rounds"]["recorded"], found["rounds"]["gapless"])]
    title = "{schedule}, {devices} emulated devices, {microbatches} microbatches, {milliseconds:g} ms for each F, I "
    title += "and W, up to {actions_per_device} actions each" + ("\nboth timelines: {html}" if found["html"] else "")
    below, near = (f"{100 * found[key]:.1f}%" for key in ("cost_target", "difference_target"))
    cost = of_rounds("cost of recording", costs, "difference", "less", f"below {below}")
    off = Figure("predicted to measured makespan", found["difference"], "difference", meant=f"within {near}")
    return told_duel(title, found, cost, off, ours="not recorded")
