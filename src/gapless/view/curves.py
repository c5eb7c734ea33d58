"""Curves of several ways to do one thing, side by side on one page: a panel for each, with the first in grey in all.

One file without scripts that works offline. Names may come from anywhere, so all text is escaped, and a content
security policy lets nothing run and nothing be loaded.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from gapless.errors import ScheduleError
from gapless.view.figures import figure
from gapless.view.template import filled, html, policy, source, text

Run = Sequence[float | None]  # None: nothing there
Points = Sequence[tuple[float, float]]
EDGE = 8  # above a drawing, and on its right
_WIDTH, _HEIGHT = 320, 200
_LETTER = 7  # the width of a digit, at the most


@dataclass(frozen=True)
class Panel:
    """One way: its runs, each with a value for each place of the axis."""

    name: str
    note: str
    runs: Sequence[Run]


def render(
    title: str,
    words: Sequence[str],
    xs: Sequence[float],
    panels: Sequence[Panel],
    axes: tuple[str, str],
    *tables: tuple[Sequence[str], Sequence[Sequence[str]]],
) -> str:
    """The page as text: `words` are its paragraphs, `tables` have headings and rows."""
    if not panels or not xs:
        raise ScheduleError("there is no curve to draw: give at least one panel, and a place on its axis")
    style = source("curves.css")
    known = [value for panel in panels for run in panel.runs for value in run if value is not None]
    starts = [value for panel in panels for run in panel.runs for value in run[:1] if value is not None]
    low = min(known, default=0.0)
    high = max(min(max(known, default=1.0), 1.1 * max(starts, default=1.0)), low + 1e-9)
    plot = Plot(_WIDTH, _HEIGHT, 40, 34, (xs[0], xs[-1], low, high))

    def drawn(panel: Panel) -> Iterator[str]:
        """The first panel in grey, then the runs and their mean."""
        yield from plot.grid(ticks(low, high))
        along, up = map(text, axes)
        yield f'<text class="x" x="{(40 + _WIDTH) / 2}" y="{_HEIGHT - 4}">{along}</text>'
        yield f'<text class="y" x="{_WIDTH - EDGE}" y="{EDGE + 10}">{up}</text>'
        lines = [("other", mean(panels[0].runs)), *(("seed", run) for run in panel.runs if len(panel.runs) > 1)]
        lines += [("mean", mean(panel.runs))] if panel is not panels[0] else []
        for kind, run in lines:
            yield plot.line(kind, [(x, value) for x, value in zip(xs, run, strict=True) if value is not None])

    return filled(
        "curves.html",
        policy=policy(style),
        title=title,
        style=style,
        paragraphs=words,
        panels=[(panel, html("".join(drawn(panel)))) for panel in panels],
        tables=tables,
        width=_WIDTH,
        height=_HEIGHT,
    )


def mean(runs: Sequence[Run]) -> list[float | None]:
    """Of those runs that are there, place by place."""
    found = []
    for values in zip(*runs, strict=True):
        known = [value for value in values if value is not None]
        found.append(fmean(known) if known else None)
    return found


@dataclass(frozen=True)
class Plot:
    """Where points are in a drawing: `bounds` are the least and the greatest of both axes. What is above is cut off."""

    width: int
    height: int
    left: int
    bottom: int
    bounds: tuple[float, float, float, float]

    def place(self, x: float, y: float) -> tuple[float, float]:
        """In pixels."""
        first, last, low, high = self.bounds
        across = (x - first) / (max(last, first + 1e-9) - first) * (self.width - self.left - EDGE)
        up = (min(y, high) - low) / (high - low) * (self.height - EDGE - self.bottom)
        return self.left + across, self.height - self.bottom - up

    def line(self, kind: str, points: Points) -> str:
        """One curve."""
        path = "L".join("{:.1f} {:.1f}".format(*self.place(x, y)) for x, y in points)
        return f'<path class="{kind}" d="M{path}"/>'

    def grid(self, marks: Sequence[float], shown: Callable[[float], str] = figure) -> Iterator[str]:
        """Lines at the marks of one axis, and the numbers of both."""
        first, last, low, _ = self.bounds
        for value in marks:
            y = self.place(first, value)[1]
            yield f'<path class="grid" d="M{self.left} {y:.1f}H{self.width - EDGE}"/>'
            yield f'<text class="y" x="{self.left - 6}" y="{y + 4:.1f}">{shown(value)}</text>'
        for value in ticks(first, last):
            at = min(self.place(value, low)[0], self.width - _LETTER * len(shown(value)) / 2)  # the last one whole, too
            yield f'<text class="x" x="{at:.1f}" y="{self.height - self.bottom + 15}">{shown(value)}</text>'


def ticks(low: float, high: float) -> list[float]:
    """About four round numbers between the two."""
    if high <= low:
        return [low]
    step = 10 ** math.floor(math.log10((high - low) / 2))
    step = next(step * factor for factor in (0.5, 1, 2, 5, 10) if (high - low) / (step * factor) <= 5)
    return [round(step * number, 10) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
