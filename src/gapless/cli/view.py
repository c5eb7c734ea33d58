"""`gapless view`: the report of a run, while it runs or after."""

import argparse
import time
from contextlib import suppress
from pathlib import Path

from gapless.cli import terminal
from gapless.cli.output import asked

EXAMPLE = "gapless view runs/gpt --html report.html"
_EVERY = 3  # seconds between two reports of a run that is followed


def add(parser: argparse.ArgumentParser) -> None:
    """Which run, and where its report goes."""
    parser.add_argument("run", metavar="RUN", help="the folder of a run of `gapless train`")
    asked.add_options(
        parser,
        ("--html", asked.file_to_write, None, "FILE", "where it goes (default: report.html in the run's folder)"),
        ("--follow", "write it again while the run trains, until it ends or Ctrl-C; the open page reloads itself"),
        ("--json", "print the figures as one JSON object instead"),
    )


def run(arguments: argparse.Namespace) -> int:
    """Reads what the run has written so far."""
    from gapless.train.run.metrics import parts_of, read_metrics, summary_of  # torch is loaded here, and not before
    from gapless.train.run.run_folder import RunFolder
    from gapless.train.run.run_report import report_of, write_report

    folder = RunFolder(Path(arguments.run))
    if arguments.json:
        found = report_of(folder)
        last = parts_of(read_metrics(folder.metrics))[-1]  # times of several parts are not averaged
        terminal.print_json({**summary_of(folder.metrics, last.after), "seconds": dict(found.spent)})
        return 0
    path = None if arguments.html is None else Path(arguments.html)

    def ended() -> bool:
        return any("ended" in line for line in read_metrics(folder.metrics))

    if arguments.follow and not ended():
        written = write_report(folder, path, _EVERY)
        terminal.say(f"open {written}: it follows the run until that ends, or Ctrl-C")
        terminal.flush()
        with suppress(KeyboardInterrupt):
            while not ended():
                time.sleep(_EVERY)
                write_report(folder, path, _EVERY)
    terminal.say(f"wrote {write_report(folder, path)}")
    return 0
