"""`python -m benchmarks all`: every benchmark that can run here, one page, and what got slower."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gapless.cli import options, terminal
from gapless.cli.parser import Parser, parse
from gapless.errors import ConfigError

EXAMPLE = "python -m benchmarks all --html report.html"
ABOUT = "every benchmark that can run here, as one page; says what got slower"


class Earlier(NamedTuple):
    """A run to compare with."""

    folder: Path
    outcomes: Mapping[str, Any]

    def __str__(self) -> str:
        return str(self.folder)


def run(words: list[str]) -> int:
    """0 if all is done, 130 if it was stopped; what was done is kept either way."""
    arguments = _parsed(words)
    from benchmarks.runner import suite  # which loads torch

    options.refuse_ranks("python -m benchmarks all")
    if arguments.compare and not Path(arguments.compare).is_dir():
        raise ConfigError(f"there is no folder {arguments.compare[:200]} to compare with: give the folder of a run")
    keys = _chosen(arguments.only, list(suite.ENTRIES))
    runs = suite.Runs(Path(arguments.results))
    folder, goes_on = runs.open(keys, quick=arguments.quick)
    before = Path(arguments.compare) if arguments.compare else runs.before(folder)
    earlier = Earlier(before, suite.stored(before)) if before else None  # looked at before the work, not after
    if goes_on:
        terminal.say(f"going on with the run in {folder}: {len(suite.stored(folder))} of {len(keys)} parts are done")

    def done(key: str, outcome: Any) -> None:
        terminal.show_progress("")
        terminal.say(f"{key}: left out, {outcome.skipped}" if outcome.skipped else f"{key}: done")
        terminal.flush()

    try:
        suite.run_all(folder, keys, quick=arguments.quick, progress=terminal.show_progress, done=done)
        runs.close(folder)
    except KeyboardInterrupt:
        terminal.show_progress("")
        there = _write_page(arguments, earlier, folder, len(keys))
        terminal.say(f"stopped: {there} of {len(keys)} parts are in {folder}; the same command goes on", sys.stderr)
        return 130
    finally:
        terminal.show_progress("")
    _write_page(arguments, earlier, folder, len(keys))
    return 0


def _parsed(words: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m benchmarks all",
        description=f"{__doc__}\n\nexample: {EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--html", type=options.file_to_write, metavar="FILE", help="write a page with all figures")
    parser.add_argument(
        "--results", metavar="FOLDER", default="gapless-results",
        help="where results are kept, a folder for each run; a stopped run goes on (default: gapless-results)",
    )  # fmt: skip
    parser.add_argument("--compare", metavar="FOLDER", help="say what got slower than in this run (default: the last)")
    parser.add_argument("--only", type=options.words, metavar="NAME,NAME", help="only these parts")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    return parse(parser, words, parser)


def _chosen(only: tuple[str, ...] | None, all_: list[str]) -> list[str]:
    for name in only or ():
        if name not in all_:
            raise ConfigError(f"there is no part {name[:40]!r}: it is one of {', '.join(all_)}")
    return [name for name in all_ if not only or name in only]


def _write_page(arguments: argparse.Namespace, earlier: Earlier | None, folder: Path, wanted: int) -> int:
    """And tell what got slower; how many parts there are."""
    from benchmarks.runner import sheet, suite
    from benchmarks.runner.slower import slower

    outcomes = suite.stored(folder)
    found = slower(earlier.outcomes, outcomes) if earlier else None
    if found is not None:
        terminal.say(found.verdict(str(earlier)))
        for each in found.worse:
            terminal.say(f"  {each}")
    if arguments.html:
        missing = wanted - len(outcomes)
        Path(arguments.html).write_text(sheet.render(outcomes, found, quick=arguments.quick, missing=missing), "utf-8")
        terminal.say(f"the page is {arguments.html}")
    terminal.say(f"the results are in {folder}")
    return len(outcomes)
