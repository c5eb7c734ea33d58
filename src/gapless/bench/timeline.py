"""What it costs to record a timeline: the same step with and without."""

from typing import Any

from gapless.bench.emulated import pipeline, step
from gapless.bench.peer.contest import Contest
from gapless.bench.rounds import Progress, median, ratio, silent, take_turns
from gapless.view import text

TARGET = 0.01


def run(
    *,
    schedule: str,
    devices: int,
    microbatches: int,
    milliseconds: float,
    steps: int,
    rounds: int,
    progress: Progress = silent,
) -> dict[str, Any]:
    contest = Contest(devices, microbatches, "emulated", seconds=milliseconds / 1000)
    with pipeline(contest, schedule) as bare, pipeline(contest, schedule, timeline=True) as recorded:
        contestants = {"recorded": step(contest, recorded, steps), "not recorded": step(contest, bare, steps)}
        seconds = take_turns(contestants, rounds, progress)
        actions = max(map(len, bare.schedule.rows))
    return {
        "benchmark": "timeline",
        "schedule": schedule,
        "devices": devices,
        "microbatches": microbatches,
        "milliseconds": milliseconds,
        "steps": steps,
        "recorded_seconds": median(seconds["recorded"]),
        "seconds": median(seconds["not recorded"]),
        "cost": ratio(seconds["recorded"], seconds["not recorded"]) - 1,
        "actions_per_device": actions,
        "target": TARGET,
        "rounds": seconds,
    }


def report(found: dict[str, Any]) -> str:
    return "\n".join(
        [
            (
                f"{found['schedule']}, {found['devices']} emulated devices, {found['microbatches']} microbatches, "
                f"{found['milliseconds']:g} ms for each F, I and W, up to {found['actions_per_device']} actions each"
            ),
            "",
            f"recorded      {1000 * found['recorded_seconds']:8.2f} ms per step",
            f"not recorded  {1000 * found['seconds']:8.2f} ms per step",
            (
                f"cost          {text.percent(found['cost']):>8}      median of the rounds; "
                f"meant: below {text.percent(found['target'])}"
            ),
        ]
    )
