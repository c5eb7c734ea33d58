"""argparse with errors of one sentence, each with the way out."""

import argparse
import re
from collections.abc import Sequence
from typing import NoReturn

from gapless.cli.terminal import complain
from gapless.errors import ConfigError, did_you_mean, printable


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
