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
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import benchmark_module
from benchmarks.runner.findings import BenchmarkResult, Figure, Table
from benchmarks.runner.parameters import command_of
from benchmarks.runner.rounds import Progress, write_whole
from gapless._version import __version__
from gapless.errors import ConfigError
from gapless.plan.profile.measure import cores
from gapless.units import show_count

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


def measured(name: str, given: Mapping[str, Any], progress: Progress) -> Outcome:
    """Of a benchmark, run with these options."""
    return outcome(name, given, benchmark_module(name).run(**given, progress=progress))


def outcome(name: str, given: Mapping[str, Any], made: BenchmarkResult | None = None, skipped: str = "") -> Outcome:
    """Of what was made with these options, here and now; where files were written is not a part of it."""
    date, made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"), made or BenchmarkResult()
    asked = {option: None if isinstance(value, Path) else value for option, value in given.items()}
    found = {"benchmark": name, **asked, **made.found} if made.found else {}
    tables = [table for table in made.tables if table.in_docs]
    command = command_of(name, given)
    return Outcome(name, command, date, environment(), made.figures, tables, made.text, found, skipped)


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


# -- on what it was measured -------------------------------------------------------------------------------------------


def environment() -> dict[str, str | int]:
    """Processor, cores, GPU where there is one, and versions. No host name, no path."""
    system = f"{platform.system()} {platform.machine()}"
    found: dict[str, str | int] = {"cpu": _processor(), "cores": cores(), "os": system}
    found |= {"python": platform.python_version(), "torch": torch.__version__, "gapless": __version__}
    return found | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def _processor() -> str:
    """As the system names it; ARM machines have a number for the maker and one for the part."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    known = dict(re.findall(r"^(model name|CPU part)\s*:\s*(.*?)\s*$", info.read_text("utf-8"), re.MULTILINE))
    part = f", part {known['CPU part']}" if "CPU part" in known else ""
    return str(known.get("model name", f"{platform.machine()}{part}"))


# -- what got slower since an earlier run ------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """What got slower, a line each, out of how many figures that were compared; and how many could not be, by the
    reason why.
    """

    worse: Sequence[str]
    compared: int
    apart: Mapping[str, int]

    def verdict(self, than: str) -> str:
        """A sentence, or the heading of a list. Silence about what was not compared would read as good news."""
        if self.compared == 0:
            why = ", ".join(self.apart) or "there are no figures"
            return f"nothing could be compared with {than}: {why}"
        figures, apart = show_count(self.compared, "figure"), sum(self.apart.values())
        said = f"nothing got slower than in {than}, of {figures} compared"
        if self.worse:
            said = f"{len(self.worse)} of {figures} got slower than in {than}"
        if apart:
            rest = ", ".join(f"{count} ({why})" for why, count in self.apart.items())
            said += f"; {apart} of {self.compared + apart} could not be compared: {rest}"
        return said


def slower(before: Mapping[str, Outcome], now: Mapping[str, Outcome]) -> Comparison:
    """By more than the rounds spread: their intervals do not overlap. Only what ran alike on the same processor."""
    worse, compared, apart = list[str](), 0, Counter[str]()
    for part, outcome in now.items():
        earlier = before.get(part)
        known = {figure.name: figure for figure in earlier.figures} if earlier else {}
        for figure in filter(_counts, outcome.figures):
            was = known.get(figure.name)
            if earlier is None or earlier.skipped:
                apart["the part was not run before"] += 1
            elif any(earlier.environment.get(of) != outcome.environment.get(of) for of in ("cpu", "cores", "gpu")):
                apart["it ran on another machine"] += 1
            elif earlier.command != outcome.command:
                apart["it ran with other options"] += 1
            elif was is None or not _counts(was) or was.unit != figure.unit:
                apart["the figure is new"] += 1
            else:
                compared += 1
                if _worse(was, figure):
                    there, here = (f"{each} ({each.between})" for each in (was, figure))
                    worse.append(f"{part}, {figure.name}: {here}, it was {there}")
    return Comparison(worse, compared, apart)


def _counts(figure: Figure) -> bool:
    """Whether it has rounds, and a side that is the better one."""
    return figure.low is not None and figure.high is not None and figure.better != ""


def _worse(before: Figure, now: Figure) -> bool:
    assert before.low is not None and before.high is not None and now.low is not None and now.high is not None  # noqa: PT018
    return now.low > before.high if now.better == "less" else now.high < before.low
