"""What a benchmark prints: a title, then figures, then a verdict."""

from collections.abc import Sequence
from typing import Any

from benchmarks.runner.rounds import Contestant, Progress, median, ratio, take_turns
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


def fight(
    ours: Contestant, other: str, theirs: Contestant, rounds: int, progress: Progress, *, warmup: int = 1
) -> dict[str, Any]:
    """The median seconds of both, and `ratio`: how many times as long the other one takes."""
    seconds = take_turns({"gapless": ours, other: theirs}, rounds, progress, warmup)
    return {
        "seconds": median(seconds["gapless"]),
        f"{other}_seconds": median(seconds[other]),
        "ratio": ratio(seconds[other], seconds["gapless"]),
        "rounds": seconds,
    }


def told(title: str, seconds: dict[str, float], *figures: tuple[str, str, str]) -> str:
    """The seconds of both by their names, then the figures that count: name, value, and what it is meant to be."""
    lines = [(name, f"{milliseconds(value, 2)}", "per step") for name, value in seconds.items()]
    lines += [(name, value, f"median of the rounds; meant: {meant}") for name, value, meant in figures]
    width = max(len(name) for name, _, _ in lines)
    return "\n".join([title, "", *(f"{name:<{width}}  {value:>10}  {note}" for name, value, note in lines)])
