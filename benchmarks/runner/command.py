"""`python -m benchmarks`: measure, always against a bound or a peer in the same run.

The options of a benchmark are the parameters of its `run` (see `benchmarks.runner.parameters`): there is no list of
them here. A benchmark is loaded once it is named, since that loads torch.
"""

import argparse
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

from benchmarks import BENCHMARKS, benchmark_module
from benchmarks.runner import all_parts
from benchmarks.runner.parameters import Between
from gapless.cli import exit_code, options, terminal
from gapless.cli.parser import Parser, parse

PROGRAM = "python -m benchmarks"
EXAMPLE = f"{PROGRAM} emulated --devices 8 --microbatches 16"
_LETTERS = {"devices": "K", "microbatches": "M"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark and return its exit code; without a name list them."""
    return exit_code(_run, argv)


def _run(words: list[str]) -> int:
    parser = _parser(PROGRAM, "Measure schedules against their bound, and gapless against its peers.", EXAMPLE)
    lines = [f"\n  {name:<10}  {each.about}" for name, each in BENCHMARKS.items()]
    parser.description = f"{parser.description}\n\nbenchmarks; each has its own --help:{''.join(lines)}"
    parser.description += f"\n  {'all':<10}  {all_parts.ABOUT}"
    parser.add_argument("name", nargs="?", metavar="NAME", choices=[*BENCHMARKS, "all"], help="one of the benchmarks")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="its options")
    arguments = parse(parser, words, parser)
    if arguments.name is None:
        parser.print_help()
        return 0
    if arguments.name == "all":
        return all_parts.run(arguments.words)
    return _measure(arguments.name, arguments.words)


def _parser(program: str, description: str, example: str) -> Parser:
    return Parser(
        prog=program,
        description=description,
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _measure(name: str, words: list[str]) -> int:
    benchmark = benchmark_module(name)
    example = BENCHMARKS[name].example
    parser = _parser(f"{PROGRAM} {name}", (benchmark.__doc__ or "").strip(), f"{PROGRAM} {name} {example}".strip())
    hints = get_type_hints(benchmark.run, include_extras=True)
    checks = {}
    for parameter in inspect.signature(benchmark.run).parameters.values():
        if parameter.name != "progress":
            kind, *notes = get_args(hints[parameter.name])
            add_option(parser, parameter.name, kind, parameter.default, *notes)
            checks[parameter.name] = [note for note in notes if callable(note)]
    parser.add_argument(
        "--json", nargs="?", const=True, type=options.file_to_write, metavar="FILE",
        help="print one JSON object; with a file: store the result there, for pages and comparisons",
    )  # fmt: skip
    given = vars(parse(parser, words, parser))
    as_json = given.pop("json")
    for option, value in given.items():
        for check in checks[option]:
            for each in value if isinstance(value, tuple) else [value]:
                check(each)
    options.refuse_ranks(PROGRAM)
    try:
        found = benchmark.run(**given, progress=terminal.show_progress)
    finally:
        terminal.show_progress("")
    shown = {option: str(value) if isinstance(value, Path) else value for option, value in given.items()}
    found = {"benchmark": name, **shown, **found}
    if isinstance(as_json, str):
        _store(name, given, found, Path(as_json))
    if as_json is True:
        terminal.print_json(found)
    else:
        terminal.say(benchmark.report(found))
    return 0


def _store(name: str, given: dict[str, Any], found: dict[str, Any], file: Path) -> None:
    from benchmarks.runner import environment, outcome, suite  # which load torch

    told = suite.command(name, given)
    outcome.outcome(name, told, environment.environment(), suite.plain(name, given, found)).write(file)


def add_option(parser: argparse.ArgumentParser, name: str, kind: Any, default: Any, what: str, *notes: Any) -> None:
    """A parameter of a benchmark as an option, read as its type says."""
    flag = f"--{name.replace('_', '-')}"
    if kind is bool:
        switch = f"--no-{flag[2:]}" if default else flag
        parser.add_argument(switch, dest=name, action="store_false" if default else "store_true", help=what)
        return
    range_ = next((note for note in notes if isinstance(note, Between)), Between(0, 0))
    letter = _LETTERS.get(name)
    kinds: dict[Any, tuple[Callable[[str], Any], str]] = {
        int: (_count, letter or "N"),
        float: (_number(range_), "X"),
        str: (str, "NAME"),
        tuple[str, ...]: (lambda text: tuple(filter(None, text.split(","))), "NAME,NAME"),
        Path | None: (lambda text: Path(options.file_to_write(text)), "FILE"),
    }
    read, metavar = kinds[kind]
    options.add_values(parser, (f"{flag} -{letter}" if letter else flag, read, default, metavar, what))


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:9]) <= 1_000_000 or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from 1 to 1,000,000")
    return int(text)


def _number(range_: Between) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not range_.least <= value <= range_.most:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number from {range_.least:g} to {range_.most:,g}")
        return value

    return read
