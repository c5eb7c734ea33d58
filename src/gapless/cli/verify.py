"""`gapless verify`: check a schedule in a file, and prove that it can't hang."""

import argparse
import sys
from dataclasses import asdict
from typing import Any

from gapless.cli import options, terminal
from gapless.schedule.action import BACKWARDS
from gapless.schedule.verify import Report, verify
from gapless.units import show_count
from gapless.view import text

EXAMPLE = "gapless show 1f1b --format text > mine.txt; gapless verify mine.txt"


def add(parser: argparse.ArgumentParser) -> None:
    """Which file, and how to print what is wrong with it."""
    parser.add_argument("file", metavar="FILE", help="a schedule as text, CSV or JSON")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Exit code 2 where the schedule is not correct."""
    schedule = options.read_schedule(arguments.file)
    report = verify(schedule)
    if arguments.json:
        terminal.print_json(_as_json(report))
    else:
        _print(report)
    return 0 if report.ok else 2


def _print(report: Report) -> None:
    schedule = report.schedule
    size = options.shown_size(schedule)
    if report.violations or report.warnings:
        terminal.draw(text.violations(report, terminal.width(), terminal.on_terminal()))
    if not report.ok:
        sys.stdout.flush()
        terminal.complain(f"{show_count(len(report.violations), 'violation')} in {schedule.name} ({size})")
        return
    terminal.say(f"{schedule.name}: correct ({size})")
    if report.buffers:
        most = max(report.buffers.values())
        channels = show_count(len(report.buffers), "channel")
        terminal.say(f"it can't hang: {channels}, at most {show_count(most, 'receive buffer')} each")
        terminal.say(f"messages that wait for a free buffer: at most {max(report.unsent.values())} per channel")
    if count := len(report.warnings):
        terminal.say(f"{count:,} backwards are out of microbatch order: their gradients wait for their turn, in memory")
    elif not schedule.kinds.isdisjoint(BACKWARDS):
        terminal.say(
            "every stage runs its backwards in microbatch order: gradients are bit-identical to the plain loop"
        )


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "schedule": report.schedule.name,
        "ok": report.ok,
        "in_order": report.in_order,
        "violations": list(map(asdict, report.violations)),
        "warnings": list(map(asdict, report.warnings)),
        "buffers": [
            {"source": source, "target": target, "kind": kind, "buffers": count, "unsent": report.unsent[channel]}
            for channel, count in report.buffers.items()
            for source, target, kind in [channel]
        ],
    }
