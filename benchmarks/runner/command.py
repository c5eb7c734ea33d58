"""`python -m benchmarks`: measure, always against a bound or a peer in the same run.

The options of a benchmark are the parameters of its `run` (see `benchmarks.runner.parameters`): there is no list of
them here. A benchmark is loaded once it is named, since that loads torch; so is what stores results.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import BENCHMARKS, ENTRIES, benchmark_module
from benchmarks.runner.parameters import PROGRAM, make_parser, one_of, parsed
from gapless.cli import exit_code, options, terminal
from gapless.cli.output import asked
from gapless.cli.terminal import parse
from gapless.errors import ConfigError

_ABOUT = "Measure schedules against their bound, and gapless against its peers.\n\nbenchmarks; each has its own --help:"
_ALL = "every benchmark that can run here, as one page; says what got slower"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark and return its exit code; without a name list them."""
    return exit_code(_run, argv)


def _run(words: list[str]) -> int:
    known = BENCHMARKS | {"all": _ALL}
    listed = "".join(f"\n  {name:<10}  {about}" for name, about in known.items())
    parser = make_parser("", f"{_ABOUT}{listed}\n\nexample: {PROGRAM} emulated --devices 8 --microbatches 16")
    parser.add_argument("name", nargs="?", metavar="NAME", choices=[*known], help="one of the benchmarks")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="its options")
    arguments = parse(parser, words, parser)
    if arguments.name is None:
        parser.print_help()
        return 0
    return _all(arguments.words) if arguments.name == "all" else _one(arguments.name, arguments.words)


def _one(name: str, words: list[str]) -> int:
    given, as_json = parsed(name, words)
    options.refuse_ranks(PROGRAM)
    from benchmarks.runner.outcome import measured, outcome

    try:
        found = measured(name, given, terminal.show_progress)
    finally:
        terminal.show_progress("")
    if isinstance(as_json, str):
        outcome(name, given, found).write(Path(as_json))
    if as_json is True:
        terminal.print_json(found)
    else:
        terminal.say(benchmark_module(name).told(found).text)
    return 0


# -- all of them -------------------------------------------------------------------------------------------------------


def _all(words: list[str]) -> int:
    """0 if all is done, 130 if it was stopped; what was done is kept either way."""
    arguments = _parsed(words)
    from benchmarks.runner import outcome, suite, summary_page

    options.refuse_ranks(f"{PROGRAM} all")
    if arguments.compare and not Path(arguments.compare).is_dir():
        raise ConfigError(f"there is no folder {arguments.compare[:200]} to compare with: give the folder of a run")
    for part in arguments.only or ():
        one_of("part", *ENTRIES)(part)
    keys = [key for key in ENTRIES if not arguments.only or key in arguments.only]
    runs = suite.Runs(Path(arguments.results))
    folder, goes_on = runs.open(keys, quick=arguments.quick)
    earlier = Path(arguments.compare) if arguments.compare else runs.before(folder)
    before = suite.stored(earlier) if earlier else None  # looked at before the work, not after
    if goes_on:
        terminal.say(f"going on with the run in {folder}: {len(suite.stored(folder))} of {len(keys)} parts are done")
    stopped = False
    try:
        suite.run_all(folder, keys, quick=arguments.quick, progress=terminal.show_progress, done=_say_done)
    except KeyboardInterrupt:
        stopped = True
    finally:
        terminal.show_progress("")
    outcomes = suite.stored(folder)
    slower = None if before is None else outcome.slower(before, outcomes)
    if slower is not None:
        terminal.say("\n  ".join([slower.verdict(f"{earlier}"), *slower.worse]))
    if arguments.html:
        page = summary_page.render(outcomes, slower, quick=arguments.quick, missing=len(keys) - len(outcomes))
        Path(arguments.html).write_text(page, "utf-8")
        terminal.say(f"the page is {arguments.html}")
    terminal.say(f"the results are in {folder}")
    if stopped:
        told = f"stopped: {len(outcomes)} of {len(keys)} parts are in {folder}; the same command goes on"
        terminal.say(told, sys.stderr)
    return 130 if stopped else 0


def _parsed(words: list[str]) -> argparse.Namespace:
    parser = make_parser("all", f"{_ALL[0].upper()}{_ALL[1:]}.\n\nexample: {PROGRAM} all --html report.html")
    parser.add_argument("--html", type=asked.file_to_write, metavar="FILE", help="write a page with all figures")
    parser.add_argument(
        "--results", metavar="FOLDER", default="gapless-results",
        help="where results are kept, a folder for each run; a stopped run goes on (default: gapless-results)",
    )  # fmt: skip
    parser.add_argument("--compare", metavar="FOLDER", help="say what got slower than in this run (default: the last)")
    parser.add_argument("--only", type=options.words, metavar="NAME,NAME", help="only these parts")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    return parse(parser, words, parser)


def _say_done(key: str, outcome: Any) -> None:
    terminal.show_progress("")
    terminal.say(f"{key}: left out, {outcome.skipped}" if outcome.skipped else f"{key}: done")
    terminal.flush()
