"""The report of a run on one page: its figures, its curves, where the time went, and its timelines.

It is the page of timelines with more in front, so the same rules hold: one file that works offline, text that is always
escaped, and a content security policy that lets nothing run or load but what is in it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files

from gapless.schedule.timeline import Timeline
from gapless.view import page
from gapless.view.curves import ticks
from gapless.view.summary import figure, text

_WIDTH, _HEIGHT = 360, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 8, 8, 24
_POINTS = 300  # of a curve at the most; more are not seen

Points = Sequence[tuple[float, float]]


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
    spent     seconds by what they were spent on
    tables    by their title; rows of two columns
    listings  texts by their title, shown as they are
    """

    title: str
    tiles: Sequence[tuple[str, str]]
    curves: Sequence[Curve]
    spent: Sequence[tuple[str, float]]
    tables: Sequence[tuple[str, Sequence[tuple[str, str]]]]
    listings: Sequence[tuple[str, str]]
    timelines: Sequence[Timeline]


def render(report: RunReport) -> str:
    """The page as text."""
    tiles = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in report.tiles)
    front = [
        f'<dl class="tiles">{tiles}</dl>',
        f'<div class="panels">{"".join(map(_figure, report.curves))}</div>',
        _spent(report.spent),
        *(_table(title, rows) for title, rows in report.tables),
        *(_listing(title, words) for title, words in report.listings),
    ]
    style = files("gapless.view").joinpath("run.css").read_text(encoding="utf-8")
    joined = '<section class="report" aria-label="The run">' + "\n".join(front) + "</section>"
    return page.render(report.timelines, report.title, front=joined, more_style=style)


def thinned(points: Points) -> list[tuple[float, float]]:
    """The means of neighbours, where there are more than can be seen."""
    known = [(x, y) for x, y in points if math.isfinite(y)]
    size = math.ceil(len(known) / _POINTS) or 1
    parts = [known[at : at + size] for at in range(0, len(known), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def _figure(curve: Curve) -> str:
    lines = [(name, thinned(points)) for name, points in curve.lines]
    keys = "".join(
        _swatch(f'<path class="key-{number % 4}" d="M0 5H14"/>') + f"{text(name)} "
        for number, (name, _) in enumerate(lines)
        if len(lines) > 1
    )
    drawn = "".join(_drawn([points for _, points in lines]))
    return (
        f"<figure><figcaption><h2>{text(curve.name)}</h2><span>{keys}{text(curve.note)}</span></figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text(curve.name)}">{drawn}</svg></figure>'
    )


def _drawn(lines: Sequence[Points]) -> Iterator[str]:
    xs, ys = ([point[axis] for points in lines for point in points] for axis in (0, 1))
    if not xs:
        yield f'<text class="x" x="{_WIDTH / 2}" y="{_HEIGHT / 2}">nothing yet</text>'
        return
    first, last, low, high = min(xs), max(max(xs), min(xs) + 1e-9), min(ys), max(ys)
    marks = ticks(low, high)
    if high - low <= 1e-6 * abs(high):  # a flat line, in the middle
        marks, low, high = [low], low - (abs(low) or 1.0), low + (abs(low) or 1.0)

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)
        return across, _HEIGHT - _BOTTOM - (y - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    for value in marks:
        y = place(first, value)[1]
        yield f'<path class="gridline" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
        yield f'<text class="y" x="{_LEFT - 6}" y="{y + 4:.1f}">{_short(value)}</text>'
    for value in ticks(first, last):
        yield f'<text class="x" x="{place(value, low)[0]:.1f}" y="{_HEIGHT - 6}">{_short(value)}</text>'
    for number, points in enumerate(lines):
        path = "L".join("{:.1f} {:.1f}".format(*place(x, y)) for x, y in points)
        yield f'<path class="line-{number % 4}" d="M{path}"/>'


def _short(value: float) -> str:
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 10 * factor:
            return f"{value / factor:.4g}{unit}"
    return figure(value) if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"


def _spent(spent: Sequence[tuple[str, float]]) -> str:
    """A bar of all seconds, and a table of them."""
    total = sum(seconds for _, seconds in spent) or 1.0
    bar, rows, at = [], [], 0.0
    for number, (name, seconds) in enumerate(spent):
        share = seconds / total
        bar.append(f'<rect class="part-{number}" x="{1000 * at:.2f}" y="0" width="{1000 * share:.2f}" height="18"/>')
        swatch = _swatch(f'<rect class="part-{number}" width="14" height="10"/>')
        rows.append(
            f'<tr><th scope="row">{swatch}{text(name)}</th><td>{seconds:,.2f} s</td><td>{100 * share:.1f}%</td></tr>'
        )
        at += share
    drawn = f'<svg viewBox="0 0 1000 18" role="img" aria-label="Where the time went">{"".join(bar)}</svg>'
    table = f"<table><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="card" id="spent"><h2>Where the time went</h2>{drawn}{table}</div>'


def _swatch(drawing: str) -> str:
    return f'<svg class="swatches" viewBox="0 0 14 10" aria-hidden="true">{drawing}</svg>'


def _table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    body = "".join(f'<tr><th scope="row">{text(name)}</th><td>{text(value)}</td></tr>' for name, value in rows)
    return f'<div class="card"><h2>{text(title)}</h2><table><tbody>{body}</tbody></table></div>'


def _listing(title: str, words: str) -> str:
    return f'<details class="card"><summary>{text(title)}</summary><pre>{text(words)}</pre></details>'
