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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import benchmark_module
from benchmarks.runner.environment import environment
from benchmarks.runner.rounds import write_whole
from benchmarks.runner.told import Figure, Table, Told
from gapless.errors import ConfigError

SCHEMA = 1


@dataclass(frozen=True)
class Outcome:
    """Of one benchmark; see above."""

    name: str
    command: str
    date: str
    environment: Mapping[str, str | int]
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    report: str = ""
    found: Mapping[str, Any] = field(default_factory=dict)
    skipped: str = ""

    def write(self, file: Path) -> None:
        """Whole or not at all."""
        write_whole(file, {"schema": SCHEMA, **asdict(self)})


def outcome(name: str, command: str, found: Mapping[str, Any] | None, skipped: str = "") -> Outcome:
    """Of what the benchmark's `run` returned, with its options; here and now."""
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
    if found is None:
        return Outcome(name, command, date, environment(), skipped=skipped)
    told: Told = benchmark_module(name).told(found)
    tables = [table for table in told.tables if table.in_docs]
    return Outcome(name, command, date, environment(), told.figures, tables, told.text, found)


def read(file: Path) -> Outcome:
    """What `write` wrote."""
    try:
        values = json.loads(file.read_text("utf-8"))
        if values.pop("schema") != SCHEMA:
            raise ConfigError(f"{file} was stored by another version of gapless: measure it again")
        values["figures"] = [Figure(**each) for each in values["figures"]]
        values["tables"] = [Table(**each) for each in values["tables"]]
        return Outcome(**values)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{file} is not a stored result of a benchmark: give another file, or delete it") from None
    except OSError as error:
        raise ConfigError(f"{file} can't be read: {error.strerror}") from None
