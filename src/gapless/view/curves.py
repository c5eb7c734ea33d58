"""Curves of several ways to do one thing, side by side on one page: a panel for each, with the first in grey in all.

One file without scripts that works offline. Names may come from anywhere, so all text is escaped, and a content
security policy lets nothing run and nothing be loaded.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from gapless.errors import ScheduleError
from gapless.view.figures import figure
from gapless.view.template import filled, hash_of, html, source, text

Run = Sequence[float | None]  # None: nothing there
_WIDTH, _HEIGHT = 320, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 8, 8, 34


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
    style, area = source("curves.css"), _Area(xs, panels, axes)
    return filled(
        "curves.html",
        policy=f"default-src 'none'; style-src 'sha256-{hash_of(style)}'; base-uri 'none'; form-action 'none'",
        title=title,
        style=style,
        paragraphs=words,
        panels=[(panel, html(area.drawn(panel))) for panel in panels],
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


class _Area:
    """Where values are in a panel. All panels have the same axes; what is above the highest start is cut off."""

    def __init__(self, xs: Sequence[float], panels: Sequence[Panel], axes: tuple[str, str]) -> None:
        self._xs, self._axes, self._panels = xs, axes, panels
        known = [value for panel in panels for run in panel.runs for value in run if value is not None]
        starts = [value for panel in panels for run in panel.runs for value in run[:1] if value is not None]
        self._low = min(known, default=0.0)
        self._high = max(min(max(known, default=1.0), 1.1 * max(starts, default=1.0)), self._low + 1e-9)
        self._reference = mean(panels[0].runs)

    def drawn(self, panel: Panel) -> str:
        """The first panel in grey, then the runs and their mean."""
        lines = [*self._grid(), self._line("other", self._reference)]
        lines += [self._line("seed", run) for run in panel.runs if len(panel.runs) > 1]
        if panel is not self._panels[0]:
            lines.append(self._line("mean", mean(panel.runs)))
        return "".join(lines)

    def _x(self, value: float) -> float:
        first, last = self._xs[0], max(self._xs[-1], self._xs[0] + 1e-9)
        return _LEFT + (value - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def _y(self, value: float) -> float:
        share = (min(value, self._high) - self._low) / (self._high - self._low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def _line(self, kind: str, run: Run) -> str:
        """Broken where there is nothing."""
        path, move = [], "M"
        for x, value in zip(self._xs, run, strict=True):
            if value is None:
                move = "M"
            else:
                path.append(f"{move}{self._x(x):.1f} {self._y(value):.1f}")
                move = "L"
        return f'<path class="{kind}" d="{"".join(path)}"/>'

    def _grid(self) -> Iterator[str]:
        for value in ticks(self._low, self._high):
            y = self._y(value)
            yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
            yield f'<text class="y" x="{_LEFT - 6}" y="{y + 4:.1f}">{figure(value)}</text>'
        for value in ticks(self._xs[0], self._xs[-1]):
            yield f'<text class="x" x="{self._x(value):.1f}" y="{_HEIGHT - _BOTTOM + 15}">{figure(value)}</text>'
        along, up = map(text, self._axes)
        yield f'<text class="x" x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 4}">{along}</text>'
        yield f'<text class="y" x="{_WIDTH - _RIGHT}" y="{_TOP + 10}">{up}</text>'


def ticks(low: float, high: float) -> list[float]:
    """About four round numbers between the two."""
    if high <= low:
        return [low]
    step = 10 ** math.floor(math.log10((high - low) / 2))
    step = next(step * factor for factor in (0.5, 1, 2, 5, 10) if (high - low) / (step * factor) <= 5)
    return [round(step * number, 10) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
