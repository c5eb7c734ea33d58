"""`gapless show`: draw a schedule, or print it."""

import argparse

from gapless.cli import options, terminal
from gapless.schedule.asynchronous.weights import weight_versions
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline
from gapless.units import show_count
from gapless.view import text

EXAMPLE = "gapless show zb-v --devices 4 --microbatches 8"


def add(parser: argparse.ArgumentParser) -> None:
    """Which schedule, and how to print it."""
    options.add_name(parser)
    parser.add_argument("--format", choices=("grid", "text", "csv", "json"), help="how to print it (default grid)")
    options.add_all(parser)


def run(arguments: argparse.Namespace) -> int:
    """A grid by default; pictures and files where they are asked for."""
    schedule, costs, limit = options.schedule_of(arguments)
    form = arguments.format or ("json" if arguments.json else "grid")
    wanted = arguments.html or arguments.svg or arguments.perfetto
    timeline = simulate(schedule, costs) if form == "grid" or wanted or limit is not None else None
    if timeline is not None:
        if misfit := options.misfit(timeline, limit):
            terminal.complain(misfit)
        options.write_pictures(arguments, [timeline], limit)
    if form == "text":
        terminal.say(schedule.text())
    elif form == "csv":
        terminal.say(schedule.csv(), end="")
    elif form == "json":
        terminal.print_json(schedule.to_json())
    elif timeline is not None:
        colour = terminal.on_terminal()
        terminal.draw(text.grid(timeline, terminal.width(), colour))
        terminal.draw(f"\n{text.key(schedule, colour)}")
        terminal.say(summary(timeline))
    return 0


def summary(timeline: Timeline) -> str:
    """One line of numbers."""
    parts = [
        f"makespan {text.number(timeline.makespan)}",
        f"bubble {text.percent(timeline.bubble)}",
        f"span bubble {text.percent(timeline.span_bubble)}",
        f"peak {text.number(max(timeline.peak))}",
        show_count(timeline.schedule.num_actions, "action"),
    ]
    if timeline.schedule.num_minibatches > 1:
        parts.insert(1, f"{text.number(timeline.period)} per minibatch in steady state")
    line = ", ".join(parts)
    if timeline.schedule.num_minibatches > 1:
        versions = weight_versions(timeline.schedule)
        kept, behind = " ".join(map(str, versions.kept)), " ".join(map(str, versions.behind))
        line += f"\nversions of the weights, by stage: {kept}; updates behind: {behind}"
    return line
