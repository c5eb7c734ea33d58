"""`python -m benchmarks`: measure, always against a bound or a peer in the same run.

The options of a benchmark are the parameters of its `run` (see `benchmarks.runner.parameters`): there is no list of
them here. A benchmark is loaded once it is named, since that loads torch; so is what stores results.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks import BENCHMARKS
from benchmarks.runner.parameters import PROGRAM, make_parser, parsed
from gapless.cli import exit_code, options, terminal
from gapless.cli.terminal import parse

_ABOUT = "Measure schedules against their bound, and gapless against its peers.\n\nbenchmarks; each has its own --help:"
_KNOWN = BENCHMARKS | {"all": "every benchmark that can run here, as one page; says what got slower"}
_PAGES = ("html", "picture")  # options that a page is written for


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark, or all, and return its exit code; without a name list them."""
    return exit_code(_run, argv)


def _run(words: list[str]) -> int:
    listed = "".join(f"\n  {name:<10}  {about}" for name, about in _KNOWN.items())
    parser = make_parser("", f"{_ABOUT}{listed}\n\nexample: {PROGRAM} emulated --devices 8 --microbatches 16")
    parser.add_argument("name", nargs="?", metavar="NAME", choices=[*_KNOWN], help="one of the benchmarks")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="its options")
    arguments = parse(parser, words, parser)
    if (name := arguments.name) is None:
        parser.print_help()
        return 0
    given, as_json = parsed(name, arguments.words)
    options.refuse_ranks(PROGRAM)
    from benchmarks.runner.outcome import measured

    try:
        made = measured(name, given, terminal.show_progress)
    finally:
        terminal.show_progress("")
    if isinstance(as_json, str):
        made.write(Path(as_json))
    if as_json is True:
        terminal.print_json(made.found)
    else:
        pages = (f"the page is {given[word]}" for word in _PAGES if given.get(word))
        terminal.say("\n\n".join(filter(None, (made.report, *pages))))
    return 0
