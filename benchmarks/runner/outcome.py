"""What a benchmark found, as it is stored: one form for all benchmarks, from which pages and docs are made.

name          of the benchmark, as in `python -m benchmarks NAME`
command       that measures it again
date          when it ended, in UTC
environment   processor, cores and versions
figures       the numbers that count, each with the least and the greatest of its rounds
tables        figures that are read side by side
report        what the command prints
found         everything else: options, rounds, rows
skipped       why there is nothing of this
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from benchmarks import benchmark_module
from benchmarks.runner.rounds import median
from gapless.errors import ConfigError

SCHEMA = 1
Unit = Literal["s", "us", "x", "share", "difference", "bytes", "count", "loss"]


@dataclass(frozen=True)
class Figure:
    """One number that counts.

    low, high   the least and the greatest of its rounds; None where it is no matter of rounds
    better      whether less or more of it is better; empty where it is only told
    meant       what it is meant to be, in words
    by          whose it is, where several do the same
    """

    name: str
    value: float
    unit: Unit
    low: float | None = None
    high: float | None = None
    better: Literal["less", "more", ""] = ""
    meant: str = ""
    by: str = "gapless"


@dataclass(frozen=True)
class Grid:
    """A table of words; numbers are formatted already."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Outcome:
    """Of one benchmark; see above."""

    name: str
    command: str
    date: str
    environment: Mapping[str, str | int]
    figures: Sequence[Figure] = ()
    tables: Sequence[Grid] = ()
    report: str = ""
    found: Mapping[str, Any] = field(default_factory=dict)
    skipped: str = ""

    def write(self, file: Path) -> None:
        """Whole or not at all."""
        aside = file.with_name(f"{file.name}.part")
        aside.write_text(json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n", "utf-8")
        os.replace(aside, file)


def read(file: Path) -> Outcome:
    """What `write` wrote."""
    try:
        values = json.loads(file.read_text("utf-8"))
        if values.pop("schema") != SCHEMA:
            raise ConfigError(f"{file} was stored by another version of gapless: measure it again")
        values["figures"] = [Figure(**each) for each in values["figures"]]
        values["tables"] = [Grid(**each) for each in values["tables"]]
        return Outcome(**values)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{file} is not a stored result of a benchmark: give another file, or delete it") from None
    except OSError as error:
        raise ConfigError(f"{file} can't be read: {error.strerror}") from None


def outcome(name: str, command: str, environment: Mapping[str, str | int], found: Mapping[str, Any]) -> Outcome:
    """Of what the benchmark's `run` returned, with its options."""
    module: Any = benchmark_module(name)
    return Outcome(
        name,
        command,
        now(),
        environment,
        module.figures(found),
        module.tables(found) if hasattr(module, "tables") else (),
        module.report(found),
        found,
    )


def now() -> str:
    """To the second."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")


def of_rounds(
    name: str,
    rounds: Sequence[float],
    unit: Unit = "s",
    better: Literal["less", "more", ""] = "less",
    meant: str = "",
    by: str = "gapless",
) -> Figure:
    """The median, between the least and the greatest."""
    return Figure(name, median(rounds), unit, min(rounds), max(rounds), better, meant, by)


def quotients(values: Sequence[float], to: Sequence[float]) -> list[float]:
    """Round by round."""
    return [mine / other for mine, other in zip(values, to, strict=True)]


def shown(value: float, unit: Unit) -> str:
    """A number as people read it."""
    match unit:
        case "s":
            return f"{value:.2f} s" if value >= 10 else f"{1000 * value:.4g} ms"
        case "us":
            return f"{value:.3g} us"
        case "x":
            return f"{value:.2f}x"
        case "share":
            return f"{100 * value:.1f}%"
        case "difference":
            return f"{100 * value:+.1f}%"
        case "bytes":
            return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"
        case "count":
            return f"{value:g}"
        case "loss":
            return f"{value:.3f}"


def between(figure: Figure) -> str:
    """The interval of its rounds."""
    if figure.low is None or figure.high is None:
        return ""
    return f"{shown(figure.low, figure.unit)} to {shown(figure.high, figure.unit)}"
