"""What a benchmark prints: a title, then figures, then a verdict."""

from collections.abc import Sequence

from gapless.view import text


def milliseconds(seconds: float, digits: int = 1) -> str:
    """A time as a cell of a table."""
    return f"{1000 * seconds:.{digits}f} ms"


def mebibytes(size: float, digits: int = 2) -> str:
    """A size as a cell of a table."""
    return f"{size / 2**20:.{digits}f} MiB"


def signed(share: float) -> str:
    """A difference in percent, with its sign even where it is positive."""
    return f"{100 * share:+.1f}%"


def tabular(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *verdict: str, left: int = 1) -> str:
    """A table under its title; the lines of the verdict come after it."""
    return "\n".join([*([title, ""] if title else []), text.table(headings, rows, left), *verdict])
