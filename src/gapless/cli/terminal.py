"""What commands print. All of it goes through here, so that names from files reach no terminal raw. And argparse, with
errors of one sentence, each with the way out.
"""

import argparse
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

from gapless.errors import ConfigError, did_you_mean, printable


def say(text: object = "", file: TextIO | None = None, end: str = "\n") -> None:
    """Lines of text, to standard output where no file is given."""
    print(printable(text, keep="\n\t"), file=file, end=end)


def complain(text: object) -> None:
    """To standard error, as what it is that complains."""
    say(f"gapless: {text}", sys.stderr)


def draw(drawing: str) -> None:
    """A drawing of actions, with its own colours: nothing else may be in it."""
    print(drawing)


def print_json(data: Any) -> None:
    """One object on one line, for programs. JSON has no nan and no infinity: they are null."""
    print(json.dumps(_finite(data), allow_nan=False))


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def show_progress(line: str) -> None:
    """One line on standard error that is written over by the next, on a terminal only; an empty one wipes it away."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"\r\x1b[K{printable(line)[: width() - 1]}", end="", file=sys.stderr, flush=True)


def flush() -> None:
    """Raises BrokenPipeError here, and not at exit, where the reader has gone."""
    print(end="", flush=True)


def on_terminal() -> bool:
    """Whether colours are seen, and wanted: https://no-color.org."""
    return sys.stdout is not None and sys.stdout.isatty() and "NO_COLOR" not in os.environ


def width() -> int:
    """Columns of the terminal; 100 where there is none."""
    return shutil.get_terminal_size((100, 24)).columns


class Parser(argparse.ArgumentParser):
    """argparse with one-sentence errors."""

    def error(self, message: str) -> NoReturn:
        """One sentence on standard error, and exit code 2."""
        complain(f"{printable(message)}; `{self.prog} --help` shows how")
        raise SystemExit(2)


def parse(
    parser: argparse.ArgumentParser, words: Sequence[str], command: argparse.ArgumentParser
) -> argparse.Namespace:
    """What the words mean; for an unknown option the error suggests the nearest one of the command."""
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        options = re.findall(r"--[a-z-]+", command.format_help())
        hint = did_you_mean(unknown[0].split("=")[0], options, f"`{command.prog} --help` shows how")
        raise ConfigError(f"{unknown[0][:60]!r} is not understood; {hint}")
    return arguments
