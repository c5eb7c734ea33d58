"""Options for what a command writes: pages, pictures and traces, and how they look."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from gapless.cli.terminal import say
from gapless.errors import ConfigError, GaplessError, printable
from gapless.schedule.costs import Number
from gapless.schedule.timeline import Timeline
from gapless.view.pictures.picture_file import draw, suffix_of


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Where a result goes beside standard output."""
    add_options(
        parser.add_argument_group("output"),
        ("--json", "print one JSON object"),
        ("--html", file_to_write, None, "FILE", "write the interactive page"),
        ("--figure --svg", picture_to_write, None, "FILE", "write a picture: .svg, .pdf or .png"),
        ("--perfetto", file_to_write, None, "FILE", "write a trace for ui.perfetto.dev"),
    )


def add_look(parser: argparse.ArgumentParser) -> None:
    """How a picture looks."""
    looks = parser.add_argument_group("figure", "how the picture of --figure looks")
    add_options(
        looks,
        ("--title", str, None, "TEXT", "a title above it"),
        ("--width", number_of, None, "MM", "its width in millimetres"),
        ("--font", str, None, "NAME", "a font family"),
    )
    looks.add_argument("--theme", choices=("light", "dark"), default="light", help="its colours (default light)")
    looks.add_argument("--greyscale", action="store_true", help="greys with hatches in place of colours")
    looks.add_argument("--no-labels", action="store_false", dest="labels", help="no numbers on the actions")
    looks.add_argument("--no-headings", action="store_false", dest="headings", help="no name above each timeline")


def picture_to_write(path: str) -> str:
    """One whose suffix is that of a picture."""
    try:
        suffix_of(file_to_write(path))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def file_to_write(path: str) -> str:
    """Looked at before the work that it is to hold, not after."""
    file = Path(path)
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {printable(str(file.parent)[:200])}: make it first")
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{printable(str(file)[:200])} is a folder: name a file")
    return path


def write_pictures(
    arguments: argparse.Namespace,
    timelines: Sequence[Timeline],
    limit: Number | None = None,
    unit: str = "ms",
    pictured: Sequence[Timeline] = (),
    **page_options: Any,
) -> None:
    """The files asked for; where they went is said on standard error, so that standard output stays the result. `unit`
    is that of the times, for programs that show seconds; `pictured` are those of the picture, if not all;
    `page_options` are those of the page.
    """
    from gapless.view import page, perfetto
    from gapless.view.pictures.look import Look

    look = {name: value for name, value in given(arguments, Look).items() if value is not None}
    title = getattr(arguments, "title", None) or ""
    writers: dict[str, Callable[[str], None]] = {
        "html": lambda path: page.write(path, timelines, memory_limit=limit, **page_options),
        "figure": lambda path: draw(path, *(pictured or timelines), title=title, **look),
        "perfetto": lambda path: perfetto.write(path, timelines, unit),
    }
    if arguments.perfetto and (warning := perfetto.about_its_size(timelines)):
        say(warning, sys.stderr)
    refused: list[GaplessError] = []
    for name, write in writers.items():
        if path := getattr(arguments, name):
            try:
                write(path)
                say(f"wrote {path}", sys.stderr)
            except GaplessError as error:  # the other files are wanted all the same
                refused.append(error)
    if refused:
        raise type(refused[0])("; ".join(map(str, refused)))


def add_options(group: Any, *rows: tuple[str, Callable[[str], Any], Any, str, str] | tuple[str, str]) -> None:
    """Of an option that takes a value: the flags, how it is read, its default, a word for it in the help, and what it
    is. Of a switch: its flag, and what it does.
    """
    for flags, *value, what in rows:
        if not value:
            group.add_argument(flags, action="store_true", help=what)
            continue
        read, default, word = value
        shown = ",".join(default) if isinstance(default, tuple) else default
        told = what if default is None else f"{what} (default {shown})"
        group.add_argument(*flags.split(), type=read, default=default, metavar=word, help=told)


@contextmanager
def naming(option: str) -> Iterator[None]:
    """A fault that is read in here is said of this option: `is 3, but ...` comes after its name."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{option} {error}") from None


def given(arguments: argparse.Namespace, kind: Any) -> dict[str, Any]:
    """The fields of a dataclass that are options."""
    return {field.name: vars(arguments)[field.name] for field in fields(kind) if field.name in arguments}


def number_of(text: str) -> Number:
    """A number of the command line."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number") from None
    return int(value) if value.is_integer() and abs(value) < 2**53 else value
