"""`gapless show`: draw schedules, or print one."""

import argparse

from gapless.cli import options, terminal
from gapless.cli.output import asked
from gapless.errors import ConfigError
from gapless.schedule.asynchronous.weights import weight_versions
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline
from gapless.units import show_count
from gapless.view import text

EXAMPLE = "gapless show zb-v --devices 4 --microbatches 8"


def add(parser: argparse.ArgumentParser) -> None:
    """Which schedules, and how to print them."""
    options.add_name(parser, several=True)
    parser.add_argument("--format", choices=("grid", "text", "csv", "json"), help="how to print it (default grid)")
    options.add_steps(parser)
    options.add_all(parser)


def run(arguments: argparse.Namespace) -> int:
    """A grid by default; pictures and files where they are asked for."""
    form = arguments.format or ("json" if arguments.json else "grid")
    if form != "grid" and len(arguments.schedules) > 1:
        raise ConfigError(f"--{'json' if arguments.json else f'format {form}'} prints one schedule: name one")
    wanted = arguments.html or arguments.figure or arguments.perfetto
    found = [options.schedule_of(arguments, name) for name in arguments.schedules]
    limit = found[0][2]
    if form == "grid" or wanted or limit is not None:
        timelines = [simulate(schedule, costs) for schedule, costs, _ in found]
        for timeline in timelines:
            if misfit := options.misfit(timeline, limit):
                terminal.complain(misfit)
        asked.write_pictures(arguments, timelines, limit)
    schedule = found[0][0]
    if form == "text":
        terminal.say(schedule.text())
    elif form == "csv":
        terminal.say(schedule.csv(), end="")
    elif form == "json":
        terminal.print_json(schedule.to_json())
    else:
        for number, timeline in enumerate(timelines):
            if len(timelines) > 1:
                terminal.say(f"{chr(10) if number else ''}{timeline.name}")
            _draw(timeline)
    return 0


def _draw(timeline: Timeline) -> None:
    colour = terminal.on_terminal()
    terminal.draw(text.grid(timeline, terminal.width(), colour))
    terminal.draw(f"\n{text.key(timeline.schedule, colour)}")
    terminal.say(summary(timeline))


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
