"""Timelines as a picture that stands still: one SVG for a document, a slide or a README.

gpipe   makespan 33 · bubble 27.27% · peak 8
device 0  |0|1|2|3|/////////////|  0  |  1  |  2  |  3  |
device 1  //|0|1|2|3|/////////|  0  |  1  |  2  |  3  |//
time      0         5        10        15        20
"""

import math
import re
from collections.abc import Iterator, Sequence
from html import escape

from gapless.errors import ScheduleError
from gapless.schedule.action import TRANSFERS, Kind
from gapless.schedule.timeline import Timeline
from gapless.view import legend
from gapless.view.figures import figure
from gapless.view.host_lanes import Lanes, lanes_of
from gapless.view.summary import named
from gapless.view.text import percent

from .look import Look, shade_class

MAX_ACTIONS = 50_000
_MAX_TITLED = 5_000  # beyond, the words on hover would be most of the file
_GUTTER, _MARGIN = 76, 16
_BAR, _PITCH = 22, 28
_HEAD, _GAP, _AXIS, _LEGEND, _TITLE = 30, 18, 30, 30, 40
_DIGIT = 7.0

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(
    timelines: Sequence[Timeline], width: int = 1200, title: str = "", hover: bool = True, look: Look | None = None
) -> str:
    """One picture of all timelines on one time axis, `width` pixels wide unless the look has one, below a title if
    there is one. `hover`: every action says what it is under the pointer, which most of the file is for.
    """
    look = look or Look()
    if not timelines:
        raise ScheduleError("there is no timeline to draw: give at least one")
    total = sum(timeline.schedule.num_actions for timeline in timelines)
    if total > MAX_ACTIONS:
        raise ScheduleError(
            f"{total:,} actions are too many for an SVG, which takes at most {MAX_ACTIONS:,}: "
            "use --html, which draws millions"
        )
    wide = max(width, 320) if look.pixels is None else look.pixels
    drawing = _Drawing(timelines, wide, title, look, titled=hover and total <= _MAX_TITLED)
    body = list(drawing.parts())
    summary = escape("; ".join(f"{_clean(named(t))}: makespan {figure(t.makespan)}" for t in timelines))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {_sizes(drawing, look)} '
        f'viewBox="0 0 {drawing.width} {drawing.height}" role="img">\n<title>Timelines: {summary}</title>\n'
        f"<style>{look.style(drawing.shades)}</style>\n"
        f"<defs>{_hatch('inner')}{_hatch('outer')}{look.patterns(drawing.shades)}</defs>\n"
        f'<rect class="page" width="100%" height="100%"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def size_of(picture: str) -> tuple[int, int]:
    """Its width and height in pixels."""
    found = re.search(r'viewBox="0 0 (\d+) (\d+)"', picture)
    assert found is not None
    return int(found[1]), int(found[2])


class _Drawing:
    """Where things are, and which fills were used."""

    def __init__(self, timelines: Sequence[Timeline], width: int, title: str, look: Look, titled: bool) -> None:
        self.timelines, self.width, self.title, self.titled = [*map(lanes_of, timelines)], width, title, titled
        self.look, self.head = look, _HEAD if look.headings else 0
        self.top = _TITLE if title else 0
        self.longest = max(float(timeline.makespan) for timeline in timelines) or 1.0
        self.plot = width - _GUTTER - 2 * _MARGIN
        self.shades: set[tuple[Kind, int, int]] = set()
        devices = sum(len(timeline.labels) for timeline in self.timelines)
        self.height = self.top + _LEGEND + len(timelines) * (self.head + _GAP) + devices * _PITCH + _AXIS
        self.bottom = self.height - _AXIS

    def x(self, time: float) -> float:
        return _MARGIN + _GUTTER + time / self.longest * self.plot

    def parts(self) -> Iterator[str]:
        if self.title:
            yield f'<text class="title" x="{_MARGIN}" y="34">{escape(_clean(self.title))}</text>'
        yield from self._legend()
        yield from self._axis()
        top = self.top + _LEGEND
        for timeline in self.timelines:
            yield from self._timeline(timeline, top)
            top += self.head + _GAP + timeline.schedule.num_devices * _PITCH

    def _legend(self) -> Iterator[str]:
        x, y = float(_MARGIN), self.top + 10
        entries = [(kind, legend.ENTRIES[kind].name) for kind in legend.present([t.schedule for t in self.timelines])]
        # Where the names do not fit, the letters stand alone.
        fits = sum(44 + 7 * len(name) for _, name in entries) + 60 < self.width
        for kind, name in entries:
            self.shades.add((kind, 0, 2))
            yield f'<rect class="{shade_class(kind, 0, 2)}" x="{x:g}" y="{y}" width="20" height="16" rx="3"/>'
            if hatch := self.look.hatch_of(kind):
                yield f'<path class="{hatch}" d="M{x:g} {y}h20v16h-20z"/>'
            if kind not in TRANSFERS:
                yield f'<text class="label" x="{x + 10:g}" y="{y + 12}">{kind.value}</text>'
            if fits:
                yield f'<text class="muted" x="{x + 26:g}" y="{y + 12}">{name}</text>'
            x += 44 + 7 * len(name) if fits else 26
        yield f'<rect class="inner" x="{x:g}" y="{y}" width="20" height="16" rx="3"/>'
        yield f'<text class="muted" x="{x + 26:g}" y="{y + 12}">idle</text>'

    def _axis(self) -> Iterator[str]:
        for tick in _ticks(self.longest, max(2, self.plot // 90)):
            x = self.x(tick)
            yield f'<path class="grid" d="M{x:.2f} {self.top + _LEGEND + self.head}V{self.bottom}"/>'
            yield f'<text class="tick" x="{x:.2f}" y="{self.bottom + 14}">{figure(tick)}</text>'
        yield f'<text class="muted" x="{_MARGIN}" y="{self.bottom + 14}">time</text>'

    def _timeline(self, timeline: Lanes, top: float) -> Iterator[str]:
        if self.look.headings:
            yield from self._heading(timeline, top)
        for row, tints in enumerate(timeline.tints):
            yield from self._row(timeline, row, tints, top + self.head + row * _PITCH)

    def _heading(self, timeline: Lanes, top: float) -> Iterator[str]:
        name = _clean(named(timeline))
        room = max(4, int((self.width - 2 * _MARGIN) / 9))
        shown = name if len(name) <= room else name[: room - 1] + "…"
        yield f'<text class="name" x="{_MARGIN}" y="{top + 20}">{escape(shown)}'
        figures = (
            f"makespan {figure(timeline.makespan)} · bubble {percent(timeline.bubble, 2)}"
            f" · peak {figure(max(timeline.of.peak, default=0))}"
        )
        if len(shown) * 9 + len(figures) * 7 + 40 < self.width:
            yield f'<tspan class="muted" dx="12" font-size="12" font-weight="400">{figures}</tspan>'
        yield "</text>"

    def _row(self, timeline: Lanes, row: int, tints: list[int], y: float) -> Iterator[str]:
        inset = 8 if timeline.labels[row].startswith(" ") else 0
        yield f'<text x="{_MARGIN + inset}" y="{y + 15:g}">{timeline.labels[row].strip()}</text>'
        first = timeline.start
        spans = [(a, float(start - first), float(end - first)) for a, start, end in timeline.spans(row)]
        yield self._rect("outer", 0, float(timeline.makespan), y)
        if spans and not inset:
            yield self._rect("inner", spans[0][1], spans[-1][2], y)
        tint_of = dict(zip(timeline.stages[row], tints, strict=True))
        labels: list[str] = []
        hatched: dict[str, str] = {}  # one path for all actions of a kind: to a browser's PDF each pattern is an image
        for action, start, end in spans:
            shade = (action.kind, tint_of.get(action.stage, 0), action.microbatch % legend.NUM_STEPS)
            self.shades.add(shade)
            words = f"{legend.describe(action)}, {figure(start)} to {figure(end)}" if self.titled else ""
            yield self._rect(shade_class(*shade), start, end, y, words)
            if hatch := self.look.hatch_of(action.kind):
                x, width = self._extent(start, end)
                hatched[hatch] = hatched.get(hatch, "") + f"M{x:.2f} {y:g}h{width:.2f}v{_BAR}h-{width:.2f}z"
            label = str(action.microbatch)
            if self.look.labels and self.x(end) - self.x(start) >= len(label) * _DIGIT + 3:
                x = (self.x(start) + self.x(end)) / 2
                text = f'x="{x:.2f}" y="{y + 15:g}">{label}</text>'
                if self.look.greyscale:
                    labels.append(f'<text class="label halo" {text}')  # above the hatches
                else:
                    yield f'<text class="label" {text}'
        yield from (f'<path class="{hatch}" d="{places}"/>' for hatch, places in hatched.items())
        yield from labels

    def _extent(self, start: float, end: float, gap: int = 1) -> tuple[float, float]:
        """Where a bar begins, and how wide it is."""
        width = self.x(end) - self.x(start)
        return self.x(start), max(0.5, width - gap if width > 4 else width)

    def _rect(self, name: str, start: float, end: float, y: float, words: str = "") -> str:
        x, width = self._extent(start, end, gap=0 if name in ("inner", "outer") else 1)
        shape = f'<rect class="{name}" x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{_BAR}"'
        rounded = ' rx="2"' if self.x(end) - self.x(start) > 6 else ""
        return f"{shape}{rounded}><title>{words}</title></rect>" if words else f"{shape}{rounded}/>"


def _hatch(name: str) -> str:
    """Idle time is shaded: pale outside the span of a device."""
    return (
        f'<pattern id="{name}" width="5" height="5" patternUnits="userSpaceOnUse"><rect class="{name}-0" width="5" '
        f'height="5"/><path class="{name}-1" d="M-1 6L6 -1M-1 1L1 -1M4 6L6 4"/></pattern>'
    )


def _sizes(drawing: _Drawing, look: Look) -> str:
    if look.width is None:
        return f'width="{drawing.width}" height="{drawing.height}"'
    return f'width="{look.width:g}mm" height="{look.width * drawing.height / drawing.width:g}mm"'


def _ticks(longest: float, count: int) -> Iterator[float]:
    """Round numbers from 0 to `longest`, at most about `count` of them."""
    rough = longest / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    for number in range(int(longest / step + 1e-9) + 1):
        yield number * step


def _clean(name: str) -> str:
    """A name without the characters that XML forbids even when escaped."""
    return _NOT_XML.sub("\ufffd", name)
