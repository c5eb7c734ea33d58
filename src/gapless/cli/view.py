"""`gapless view`: the report of a run, while it runs or after."""

import argparse
from pathlib import Path

from gapless.cli import terminal
from gapless.cli.output import asked

EXAMPLE = "gapless view runs/gpt --html report.html"


def add(parser: argparse.ArgumentParser) -> None:
    """Which run, and where its report goes."""
    parser.add_argument("run", metavar="RUN", help="the folder of a run of `gapless train`")
    asked.add_values(
        parser,
        (
            "--html",
            asked.file_to_write,
            None,
            "FILE",
            "where it goes (default: report.html in the run's folder)",
        ),
    )
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object instead")


def run(arguments: argparse.Namespace) -> int:
    """Reads what the run has written so far."""
    from gapless.train.run.metrics import summary_of  # torch is loaded here, and not before
    from gapless.train.run.run_folder import RunFolder
    from gapless.train.run.run_report import report_of, write_report

    folder = RunFolder(Path(arguments.run))
    if arguments.json:
        found = report_of(folder)
        terminal.print_json({**summary_of(folder.metrics), "seconds": dict(found.spent)})
        return 0
    terminal.say(f"wrote {write_report(folder, None if arguments.html is None else Path(arguments.html))}")
    return 0
