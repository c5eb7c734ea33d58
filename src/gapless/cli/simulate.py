"""`gapless simulate`: what a schedule costs in time and memory."""

import argparse
from typing import Any

from gapless.cli import options, terminal
from gapless.errors import ScheduleError
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline, plain
from gapless.view import text

EXAMPLE = "gapless simulate zb-h1 --devices 8 --microbatches 32 --weight-grad 0.75 --latency 0.03"


def add(parser: argparse.ArgumentParser) -> None:
    """Which schedule, and for what costs."""
    options.add_name(parser)
    options.add_all(parser)


def run(arguments: argparse.Namespace) -> int:
    """The figures; a schedule above the memory limit is an error."""
    schedule, costs, limit = options.schedule_of(arguments)
    timeline = simulate(schedule, costs)
    peak = max(timeline.peak, default=0)
    if limit is not None and float(peak) > float(limit) * (1 + 1e-9):
        raise ScheduleError(
            f"{schedule.name} does not fit: its peak of {text.number(peak)} is above the limit of {text.number(limit)}"
        )
    options.write_pictures(arguments, [timeline], limit)
    if arguments.json:
        terminal.print_json({**timeline.summary(), **_proof(arguments)})
    else:
        terminal.say(report(timeline))
    return 0


def _proof(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the solver proved, where it was asked."""
    found = getattr(arguments, "optimum", None)
    if found is None:
        return {}
    return {"bound": plain(found.bound), "gap": found.gap, "proven": found.proven, "seconds": round(found.seconds, 3)}


def report(timeline: Timeline) -> str:
    """The two bubbles, and what each device does and holds."""
    schedule = timeline.schedule
    lines = [
        (
            f"{schedule.name or 'schedule'}: {schedule.num_devices} devices, {schedule.num_stages} stages "
            f"({schedule.placement.shape}), "
            f"{schedule.num_microbatches} microbatches, {schedule.num_actions:,} actions"
        ),
        "",
        (
            f"makespan  {text.number(timeline.makespan):>10}   bubble {text.percent(timeline.bubble):>6}   "
            "first start of all to last end of all"
        ),
        (
            f"span      {text.number(timeline.span):>10}   bubble {text.percent(timeline.span_bubble):>6}   "
            "own first start to own last end, the longest"
        ),
        f"work      {text.number(timeline.work):>10}                   busy time of the busiest device",
    ]
    if schedule.num_minibatches > 1:
        lines.append(
            f"period    {text.number(timeline.period):>10}                   time per minibatch in steady state"
        )
    if schedule.num_devices <= 64:
        figures = zip(timeline.busy, timeline.idle, timeline.peak, strict=True)
        rows = [(str(device), *map(text.number, each)) for device, each in enumerate(figures)]
        lines += ["", text.table(("device", "busy", "idle", "peak"), rows, left=0)]
    else:
        lines.append(f"peak      {text.number(max(timeline.peak)):>10}                   the most a device holds")
    return "\n".join(lines)
