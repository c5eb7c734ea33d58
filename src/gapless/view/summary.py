"""The table of the page: one line per schedule, the best of each column marked.

It is written as HTML here and not by the script, so that it is there at once, and without a script too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from gapless.schedule.costs import Number
from gapless.schedule.timeline import Timeline, plain
from gapless.view.text import percent


def named(timeline: Timeline) -> str:
    """What a drawing calls it."""
    return timeline.name or timeline.schedule.name or "schedule"


def text(value: str) -> str:
    """Any string as HTML text or attribute, lone surrogates included."""
    return escape(value.encode("utf-8", "replace").decode("utf-8"), quote=True)


def figure(number: Number) -> str:
    """Seven digits at most, thousands apart, no trailing zeros."""
    value = plain(number)
    if isinstance(value, int):
        return f"{value:,}"
    if not 1e-4 <= abs(value) < 1e7:
        return f"{value:.6g}"
    whole = len(str(int(abs(value))))
    return f"{value:,.{max(0, 7 - whole)}f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class Column:
    """A figure of every timeline: its heading, what explains it, and how it is shown."""

    heading: str
    explanation: str
    value: Callable[[Timeline], Number]
    ranked: bool = True  # less is better, and the least is marked
    share: bool = False  # shown in per cent, and as a bar

    def shown(self, value: Number) -> str:
        return percent(value, 2) if self.share else figure(value)


_WAITS = "The share of the {} in which even the busiest device has nothing to do."
COLUMNS = (
    Column("makespan", "From the first start on any device to the last end on any device.", lambda t: t.makespan),
    Column("bubble", _WAITS.format("makespan"), lambda t: t.bubble, share=True),
    Column("span", "The longest time from a device's own first start to its own last end.", lambda t: t.span),
    Column("span bubble", _WAITS.format("span"), lambda t: t.span_bubble, share=True),
    Column("work", "The busy time of the busiest device.", lambda t: t.work),
    Column("peak memory", "The most that any device holds at any time.", lambda t: max(t.peak, default=0)),
    Column("devices", "How many devices take part.", lambda t: t.schedule.num_devices, ranked=False),
    Column("microbatches", "How many parts the minibatch is cut into.", lambda t: t.schedule.num_microbatches, False),
    Column("actions", "How many actions run in all.", lambda t: t.schedule.num_actions, ranked=False),
)
_PERIOD = Column("period", "The steady time per minibatch.", lambda t: t.period)


def table(timelines: Sequence[Timeline]) -> str:
    """The HTML of it."""
    columns = list(COLUMNS)
    if any(timeline.schedule.num_minibatches > 1 for timeline in timelines):
        columns.insert(0, _PERIOD)
    values = [[column.value(timeline) for timeline in timelines] for column in columns]
    head = '<th scope="col" aria-sort="none"><button type="button">schedule</button></th>' + "".join(
        f'<th scope="col" aria-sort="none" class="number"><button type="button" title="{text(column.explanation)}">'
        f"{column.heading}</button></th>"
        for column in columns
    )
    rows = "\n".join(_row(number, timeline, columns, values) for number, timeline in enumerate(timelines))
    return (
        '<table id="summary"><caption class="unseen">Summary of all schedules</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>"
    )


def _row(number: int, timeline: Timeline, columns: Sequence[Column], values: Sequence[Sequence[Number]]) -> str:
    cells = []
    for column, found in zip(columns, values, strict=True):
        value = found[number]
        best = column.ranked and _is_best(value, found)
        mark = '<span class="unseen"> (best)</span>' if best else ""
        bar = '<i class="bar"></i>' if column.share else ""
        cells.append(
            f'<td class="number{" best" if best else ""}" data-value="{float(value)!r}">'
            f"{bar}<span>{column.shown(value)}</span>{mark}</td>"
        )
    name = text(named(timeline))
    head = f'<th scope="row" title="{name}"><a href="#timeline-{number}">{name}</a></th>'
    return f'<tr data-timeline="{number}">{head}{"".join(cells)}</tr>'


def _is_best(value: Number, among: Sequence[Number]) -> bool:
    """The least, where they differ at all; floats that differ in their last bits do not."""
    low, high = float(min(among)), float(max(among))
    tolerance = 1e-9 * max(abs(low), abs(high))
    return high - low > tolerance and float(value) - low <= tolerance
