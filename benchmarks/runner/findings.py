"""What a benchmark returns: all that it found, as JSON has it; figures, the numbers that count; and tables of words,
which are made from rows of values and written as text or Markdown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.runner.rounds import median
from gapless.view import text

Found = dict[str, Any]  # JSON values
Unit = Literal["s", "us", "x", "share", "difference", "count", "loss"]
Better = Literal["less", "more", ""]
_UNITS = {"ms": (1e3, " ms", 1), "us": (1e6, " us", 0), "s": (1, " s", 2), "x": (1, "x", 2), "%": (100, "%", 1)}
_UNITS |= {"MiB": (2**-20, " MiB", 2), "GiB": (2**-30, " GiB", 1), "B": (1e-9, "B", 2), ",": (1, "", 0)}


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
    better: Better = ""
    meant: str = ""
    by: str = "gapless"

    def __str__(self) -> str:
        return shown(self.value, self.unit)

    @property
    def between(self) -> str:
        """The interval of its rounds."""
        if self.low is None or self.high is None:
            return ""
        return f"{shown(self.low, self.unit)} to {shown(self.high, self.unit)}"


def of_rounds(
    name: str, rounds: Sequence[float], unit: Unit = "s", better: Better = "less", meant: str = "", by: str = "gapless"
) -> Figure:
    """The median, between the least and the greatest."""
    return Figure(name, median(rounds), unit, min(rounds), max(rounds), better, meant, by)


def shown(value: float, unit: Unit) -> str:
    """A number as people read it."""
    if unit == "s":
        return f"{value:.2f} s" if value >= 10 else f"{1000 * value:.4g} ms"
    if unit in ("us", "count"):
        return f"{value:.3g} us" if unit == "us" else f"{value:g}"
    return cell(value, {"x": "x", "share": "%", "difference": "+%", "loss": ",.3"}[unit])


@dataclass(frozen=True)
class Table:
    """A table of words; numbers are formatted already.

    note      stands below it everywhere
    verdict   lines that only the command prints
    left      so many columns of the text are flush left
    in_docs   pages and docs have it too, in place of the bare figures
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    verdict: Sequence[str] = ()
    left: int = 1
    in_docs: bool = False


def tabulated(title: str, rows: Sequence[Mapping[str, Any]], columns: str, *verdict: str, **more: Any) -> Table:
    """A table with a line for each of the rows. Columns have ` | ` between them, each `heading=key:unit`:

    key    of the row; that of the heading if it is not given. Where there is nothing the cell is empty, and of rounds
           it is the median
    unit   how a number is shown, with its digits if they are not the usual: ms, ms.2, %, +% (with its sign), MiB, x
    """
    parsed = [_column(each) for each in columns.split(" | ")]
    cells = [tuple(cell(row.get(key), unit) for _, key, unit in parsed) for row in rows]
    return Table(title, [heading for heading, _, _ in parsed], cells, verdict=verdict, **more)


def _column(words: str) -> tuple[str, str, str]:
    named, _, unit = words.partition(":")
    heading, given, key = named.partition("=")
    return heading.strip(), key if given else heading.strip(), unit


def cell(value: Any, unit: str = "") -> str:
    """A value as a cell."""
    if value is None or not unit:
        return "" if value is None else str(value)
    name, _, digits = unit.removeprefix("+").partition(".")
    value = median(value) if isinstance(value, list) else value
    factor, suffix, usual = _UNITS[name]
    form = f"{'+' if unit[0] == '+' else ''}{',' if name == ',' else ''}.{digits or usual}f"
    return f"{factor * value:{form}}{suffix}"


def as_text(table: Table) -> str:
    """Under its title; the note and the verdict come after it."""
    parts = [table.title, text.table(table.headings, table.rows, table.left), table.note, "\n".join(table.verdict)]
    return "\n\n".join(filter(None, parts))


def as_markdown(table: Table) -> str:
    """As the docs have it."""
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in (table.headings, *table.rows)]
    lines.insert(1, "|" + "---|" * len(table.headings))
    title = f"**{table.title}**" if table.title else ""
    return "\n\n".join(filter(None, [title, "\n".join(lines), table.note]))


@dataclass(frozen=True)
class BenchmarkResult:
    """What the `run` of a benchmark returns: all that it found, the numbers that count, and what its command prints."""

    found: Mapping[str, Any] = field(default_factory=dict)
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()

    @property
    def text(self) -> str:
        """All tables, one below the other."""
        return "\n\n".join(map(as_text, self.tables))


def duel(title: str, found: Found, *figures: Figure, ours: str = "gapless") -> BenchmarkResult:
    """Of what `fight` found, which tells by `rounds` the seconds of both: these, then the figures."""
    steps = found["rounds"].items()
    rows = [(ours if by == "gapless" else by, cell(values, "ms.2"), "per step") for by, values in steps]
    rows += [(each.name, str(each), f"median of the rounds; meant: {each.meant}") for each in figures]
    return BenchmarkResult(found, figures, [Table(title, ("", "median", ""), rows)])
