"""The command line: one small file per command, each of which parses, calls and prints.

terminal      all that is printed goes through here; argparse with errors of one sentence
options       the options that commands share: sizes, costs, passes; `output`: what is written
schedules     list all schedules
show          draw a schedule
simulate      time and memory of a schedule
compare       all schedules, ranked
explore       a page with sliders, served on this machine
verify        check a schedule in a file
plan          cut a model and choose a schedule for it; what it prints and draws is in `planning`
checkpoint    list, verify and export checkpoints
train         train what a config describes
view          the report of a run

A command is a file with an EXAMPLE for its help, `add`, which declares its options, and `run`; and a line in COMMANDS.
What goes wrong is one sentence on standard error and exit code 2 (1 where training itself failed); Ctrl-C is exit code
130. Results go to standard output.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from gapless._version import __version__
from gapless.cli.terminal import Parser, complain, flush, parse
from gapless.errors import GaplessError, did_you_mean

COMMANDS = {
    "schedules": "list all schedules",
    "show": "draw a schedule, or print it as text, CSV or JSON",
    "simulate": "compute what a schedule costs in time and memory",
    "compare": "rank all schedules for given costs and memory",
    "explore": "open a local page with sliders that redraw schedules at once",
    "verify": "check a schedule in a file, and prove that it can't hang",
    "plan": "choose how to cut a model and which schedule to run, and predict time and memory",
    "train": "train the model that a config describes",
    "checkpoint": "list, verify and export checkpoints",
    "view": "write the report of a run: curves, timelines, where the time went",
}
_ELSEWHERE = {"bench": "benchmarks are run from the repository as `python -m benchmarks`"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    return exit_code(_run, argv)


def exit_code(run: Callable[[list[str]], int], argv: Sequence[str] | None = None) -> int:
    """Of a program with these words, by default its own: what goes wrong in it is one sentence."""
    try:
        code = run(list(sys.argv[1:] if argv is None else argv))
        flush()  # a pipe that is closed shows here, not at exit
        return code
    except GaplessError as error:
        return _complain(str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: nothing left to say
        return 0
    except KeyboardInterrupt:
        complain("stopped")
        return 130
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 0
    except (OSError, UnicodeError) as error:
        return _complain(str(error))
    except MemoryError:
        return _complain("this takes more memory than there is: use fewer devices or microbatches")


def _complain(message: str) -> int:
    complain(message)
    return 2


def _run(argv: list[str]) -> int:
    parser = Parser(
        prog="gapless",
        description="Pipeline-parallel training on PyTorch: see, check and simulate schedules, then train with them.",
        epilog="example: gapless compare --devices 8 --microbatches 32",
    )
    parser.add_argument("--version", action="version", version=f"gapless {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    name = next((word for word in argv if not word.startswith("-")), None)
    if name is not None and name not in COMMANDS:
        hint = _ELSEWHERE.get(name) or did_you_mean(name, COMMANDS, "`gapless --help` lists them.", 0.4)
        return _complain(f"there is no command {name[:60]!r}; {hint}")
    asked = None
    for command, purpose in COMMANDS.items():
        if command != name:
            commands.add_parser(command, help=purpose, add_help=False)
            continue
        # Only the command that was asked for is loaded, so that each starts at once.
        asked = import_module(f"gapless.cli.{command}")
        own = commands.add_parser(
            command,
            help=purpose,
            description=purpose[0].upper() + purpose[1:] + ".",
            epilog=f"example: {asked.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        asked.add(own)
    arguments = parse(parser, argv, commands.choices[name] if name else parser)
    if asked is None:
        parser.print_help()
        return 0
    code: int = asked.run(arguments)
    return code
