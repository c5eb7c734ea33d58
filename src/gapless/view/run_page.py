"""The report of a run on one page: its figures, its curves, where the time went, and its timelines.

It is the page of timelines with more in front, so the same rules hold: one file that works offline, text that is always
escaped, and a content security policy that lets nothing run or load but what is in it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gapless.schedule.timeline import Timeline
from gapless.view import page
from gapless.view.curves import EDGE, Plot, Points, ticks
from gapless.view.figures import Units, figure
from gapless.view.template import filled, html

_WIDTH, _HEIGHT = 360, 190
_POINTS = 300  # of a curve at the most; more are not seen


@dataclass(frozen=True)
class Curve:
    """Lines over the steps, each with its name."""

    name: str
    note: str
    lines: Sequence[tuple[str, Points]]


@dataclass(frozen=True)
class RunReport:
    """All that is shown.

    tiles     figures and their names
    parts     by their title: what is known of each stretch of the run, if it has several
    changes   the steps after which they begin, but for the first
    spent     seconds by what they were spent on
    tables    by their title; rows of two columns
    listings  texts by their title, shown as they are
    units     what the timelines count
    """

    title: str
    tiles: Sequence[tuple[str, str]]
    curves: Sequence[Curve]
    spent: Sequence[tuple[str, float]]
    tables: Sequence[tuple[str, Sequence[tuple[str, str]]]]
    listings: Sequence[tuple[str, str]]
    timelines: Sequence[Timeline]
    units: Units = field(default_factory=Units)
    parts: Sequence[tuple[str, Sequence[tuple[str, str]]]] = ()
    changes: Sequence[int] = ()


def render(report: RunReport, refresh: int = 0) -> str:
    """The page as text, which loads itself again every `refresh` seconds, if that is not 0."""
    total = sum(seconds for _, seconds in report.spent) or 1.0
    spent = [(name, seconds / total, f"{seconds:,.2f} s") for name, seconds in report.spent]
    curves = [
        (curve, html("".join(_drawn([thinned(points) for _, points in curve.lines], report.changes))))
        for curve in report.curves
    ]
    parts: dict[str, Any] = {"parts": report.parts, "changes": report.changes}
    front = filled("run_front.html", tiles=report.tiles, curves=curves, width=_WIDTH, height=_HEIGHT, **parts)
    back = filled("run_back.html", spent=spent, tables=report.tables, listings=report.listings)
    return page.render(
        report.timelines, report.title, units=report.units, ranked=False, front=front, back=back, refresh=refresh
    )


def thinned(points: Points) -> list[tuple[float, float]]:
    """The means of neighbours, where there are more than can be seen."""
    known = [(x, y) for x, y in points if math.isfinite(y)]
    size = math.ceil(len(known) / _POINTS) or 1
    parts = [known[at : at + size] for at in range(0, len(known), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def _drawn(lines: Sequence[Points], changes: Sequence[int] = ()) -> Iterator[str]:
    xs, ys = ([point[axis] for points in lines for point in points] for axis in (0, 1))
    if not xs:
        yield f'<text class="x" x="{_WIDTH / 2}" y="{_HEIGHT / 2}">nothing yet</text>'
        return
    first, last, low, high = min(xs), max(max(xs), min(xs) + 1e-9), min(ys), max(ys)
    marks = ticks(low, high)
    if high - low <= 1e-6 * abs(high):  # a flat line, in the middle
        marks, low, high = [low], low - (abs(low) or 1.0), low + (abs(low) or 1.0)

    plot = Plot(_WIDTH, _HEIGHT, 56, 24, (first, last, low, high))
    yield from plot.grid(marks, _short)
    for value in changes:
        if first <= value <= last:
            yield f'<path class="change" d="M{plot.place(value, low)[0]:.1f} {EDGE}V{_HEIGHT - 24}"/>'
    for number, points in enumerate(lines):
        yield plot.line(f"line-{number % 4}", points)


def _short(value: float) -> str:
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 10 * factor:
            return f"{value / factor:.4g}{unit}"
    return figure(value) if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"
