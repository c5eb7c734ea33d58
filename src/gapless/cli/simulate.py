"""`gapless simulate`: what a schedule costs in time and memory."""

import argparse
from typing import Any

from gapless.cli import options, terminal
from gapless.cli.output import asked
from gapless.errors import ScheduleError
from gapless.schedule.costs import Number
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline, plain
from gapless.view import text

EXAMPLE = "gapless simulate zb-h1 --devices 8 --microbatches 32 --weight-grad 0.75 --latency 0.03"


def add(parser: argparse.ArgumentParser) -> None:
    """Which schedule, and for what costs."""
    options.add_name(parser)
    options.add_steps(parser)
    options.add_all(parser)


def run(arguments: argparse.Namespace) -> int:
    """The figures; a schedule above the memory limit is an error."""
    schedule, costs, limit = options.schedule_of(arguments, arguments.schedule)
    timeline = simulate(schedule, costs)
    if misfit := options.misfit(timeline, limit):
        raise ScheduleError(misfit)
    asked.write_pictures(arguments, [timeline], limit)
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
        f"{schedule.name or 'schedule'}: {options.shown_size(schedule, schedule.placement.shape)}",
        "",
        _line("makespan", timeline.makespan, "first start of all to last end of all", timeline.bubble),
        _line("span", timeline.span, "own first start to own last end, the longest", timeline.span_bubble),
        _line("work", timeline.work, "busy time of the busiest device"),
    ]
    if schedule.num_minibatches > 1:
        lines.append(_line("period", timeline.period, "time per minibatch in steady state"))
    if schedule.num_devices <= 64:
        figures = {"busy": timeline.busy, "idle": timeline.idle, "peak": timeline.peak}
        if schedule.has_copies:
            figures |= {"on the host": timeline.host_peak}
        rows = [
            (str(device), *map(text.number, each)) for device, each in enumerate(zip(*figures.values(), strict=True))
        ]
        lines += ["", text.table(("device", *figures), rows, left=0)]
    else:
        lines.append(_line("peak", max(timeline.peak), "the most a device holds"))
    if schedule.has_copies and timeline.costs.host_bandwidth is None and not timeline.costs.host_latency:
        lines += ["", "copies to the host take no time here: set --host-bandwidth"]
    return "\n".join(lines)


def _line(name: str, value: Number, meaning: str, bubble: Number | None = None) -> str:
    share = "" if bubble is None else f"bubble {text.percent(bubble):>6}"
    return f"{name:<8}  {text.number(value):>10}   {share:<13}   {meaning}"
