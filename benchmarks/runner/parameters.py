"""The options of benchmarks. A benchmark declares its options as the parameters of its `run`: the type says how an
option is read, the default is the option's default, and the text beside the type is its help. Those that several
benchmarks have are here.

    int               a whole number from 1 on
    float             a number in the `Between` that stands beside the type
    bool              a switch: --name where the default is False, --no-name where it is True
    tuple[str, ...]   words with commas between them
    Path | None       a file to write; with `Path` beside the type a folder
    Path              a folder
"""

import argparse
import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from benchmarks import BENCHMARKS, benchmark_module
from gapless.cli.output import asked
from gapless.cli.terminal import Parser, parse
from gapless.errors import ConfigError
from gapless.schedule.recipes import find_recipe

PROGRAM = "python -m benchmarks"
_LETTERS = {"devices": "K", "microbatches": "M"}


class Between(NamedTuple):
    """Reads a number between the least and the greatest that an option takes."""

    least: float
    most: float

    def __call__(self, text: str) -> float:
        with contextlib.suppress(ValueError):
            if self.least <= float(text) <= self.most:
                return float(text)
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number from {self.least:g} to {self.most:,g}")


Devices = Annotated[int, "devices"]
Microbatches = Annotated[int, "microbatches"]
Milliseconds = Annotated[float, "time of each F, I and W of a device", Between(0.001, 60_000)]
Rounds = Annotated[int, "number of rounds; the median counts"]
Steps = Annotated[int, "steps in a round"]
Schedule = Annotated[str, "schedule to measure", find_recipe]
Schedules = Annotated[tuple[str, ...], "schedules to measure", find_recipe]


def one_of(what: str, *known: str) -> Callable[[str], None]:
    """A check that an option, or each of its words, is one of these."""

    def check(word: str) -> None:
        if word not in known:
            raise ConfigError(f"there is no {what} {word[:40]!r}: it is one of {', '.join(known)}")

    return check


class Parameter(NamedTuple):
    """Of the `run` of a benchmark. `notes` are what stands beside the type: its help, what reads it, checks."""

    kind: Any
    default: Any
    notes: Sequence[Any]


def parameters_of(benchmark: str) -> dict[str, Parameter]:
    """Its options by name."""
    run = benchmark_module(benchmark).run
    defaults = {name: each.default for name, each in inspect.signature(run).parameters.items() if name != "progress"}
    hints = {name: get_args(hint) for name, hint in get_type_hints(run, include_extras=True).items()}
    return {name: Parameter(hints[name][0], default, hints[name][1:]) for name, default in defaults.items()}


def parsed(benchmark: str, words: Sequence[str]) -> tuple[dict[str, Any], str | bool]:
    """The options that words on the command line give it, and where its result is to go: see --json."""
    parser = make_parser(benchmark, benchmark_module(benchmark).__doc__.strip())
    parameters = parameters_of(benchmark)
    for option, parameter in parameters.items():
        _add_option(parser, option, parameter)
    if benchmark in BENCHMARKS:
        parser.add_argument(
            "--json", nargs="?", const=True, default=False, type=asked.file_to_write, metavar="FILE",
            help="print one JSON object; with a file: store the result there, for pages and comparisons",
        )  # fmt: skip
    given = vars(parse(parser, words, parser))
    as_json = given.pop("json", False)
    for option, value in given.items():
        for check in filter(callable, parameters[option].notes if value is not None else ()):
            for each in value if isinstance(value, tuple) else [value]:
                check(each)
    return given, as_json


def make_parser(name: str, about: str) -> Parser:
    """Of the program, or of one of its benchmarks."""
    shape = argparse.RawDescriptionHelpFormatter
    return Parser(prog=f"{PROGRAM} {name}".strip(), description=about, formatter_class=shape, allow_abbrev=False)


def _add_option(parser: argparse.ArgumentParser, name: str, parameter: Parameter) -> None:
    """A parameter of a benchmark as an option, read as its type says."""
    (kind, default, (about, *notes)), letter = parameter, _LETTERS.get(name)
    if kind is bool:
        switch = f"--no-{name}" if default else f"--{name}"
        parser.add_argument(switch, dest=name, action="store_false" if default else "store_true", help=about)
        return
    kinds: dict[Any, tuple[Callable[[str], Any], str]] = {
        int: (_count, letter or "N"),
        float: (notes[0] if notes else float, "X"),
        str: (str, "NAME"),
        tuple[str, ...]: (lambda text: tuple(filter(None, text.split(","))), "NAME,NAME"),
        Path | None: (Path, "FOLDER") if notes else (lambda text: Path(asked.file_to_write(text)), "FILE"),
        Path: (Path, "FOLDER"),
    }
    flags = f"--{name} -{letter}" if letter else f"--{name}"
    asked.add_options(parser, (flags, kinds[kind][0], default, kinds[kind][1], about))


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:9]) <= 1_000_000 or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from 1 to 1,000,000")
    return int(text)


def command_of(benchmark: str, options: Mapping[str, Any]) -> str:
    """What measures it again: the options that are not the defaults, but for files."""
    words = [PROGRAM, benchmark]
    for name, parameter in parameters_of(benchmark).items():
        value = options.get(name, parameter.default)
        if value == parameter.default or isinstance(value, Path):
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", ",".join(value) if isinstance(value, tuple) else f"{value}".removesuffix(".0")]
    return " ".join(words)


def check_width(width: int, heads: int = 4) -> None:
    """Of a model whose heads share it."""
    if width % heads:
        raise ConfigError(f"width is {width}, but it must be a multiple of {heads}, the number of heads")


def numbers(name: str, values: Sequence[str], *, whole: bool = True) -> list[float]:
    """Of an option that is a list of them."""
    with contextlib.suppress(ValueError):
        found = [float(value) for value in values]
        if found and all(0 < value < float("inf") and not (whole and value % 1) for value in found):
            return found
    given = f"--{name} {','.join(values)[:40]}"
    raise ConfigError(f"{given} is not a list of numbers above 0, with commas between them")
