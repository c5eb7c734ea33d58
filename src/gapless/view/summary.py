"""The table of the page: one line per schedule, the best of each column marked.

It is written as HTML here and not by the script, so that it is there at once, and without a script too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from gapless.schedule.costs import Number
from gapless.schedule.timeline import Timeline
from gapless.view.figures import Measure, Units
from gapless.view.template import filled
from gapless.view.text import percent

_BARE, _NONE = Measure(), Units()


def named(timeline: Timeline) -> str:
    """What a drawing calls it."""
    return timeline.name or timeline.schedule.name or "schedule"


@dataclass(frozen=True)
class Column:
    """A figure of every timeline: its heading, what explains it, and how it is shown."""

    heading: str
    explanation: str
    value: Callable[[Timeline], Number]
    quantity: Literal["time", "memory", "share", "count"] = "time"  # less is better, but of a count

    def shown(self, value: Number, measure: Measure = _BARE) -> str:
        """The number alone: its unit stands in the heading."""
        return percent(value, 2) if self.quantity == "share" else measure.number(value)


_WAITS = "The share of the {} in which even the busiest device has nothing to do."
COLUMNS = (
    Column("makespan", "From the first start on any device to the last end on any device.", lambda t: t.makespan),
    Column("bubble", _WAITS.format("makespan"), lambda t: t.bubble, "share"),
    Column("span", "The longest time from a device's own first start to its own last end.", lambda t: t.span),
    Column("span bubble", _WAITS.format("span"), lambda t: t.span_bubble, "share"),
    Column("work", "The busy time of the busiest device.", lambda t: t.work),
    Column("peak memory", "The most that any device holds at any time.", lambda t: max(t.peak, default=0), "memory"),
    Column("devices", "How many devices take part.", lambda t: t.schedule.num_devices, "count"),
    Column("microbatches", "How many parts the minibatch is cut into.", lambda t: t.schedule.num_microbatches, "count"),
    Column("actions", "How many actions run in all.", lambda t: t.schedule.num_actions, "count"),
)
_PERIOD = Column("period", "The steady time per minibatch.", lambda t: t.period)


def table(timelines: Sequence[Timeline], units: Units = _NONE, ranked: bool = True) -> str:
    """The HTML of it. `ranked`: whether the timelines compete, so that the best is marked; what was measured and what
    was predicted do not, nor does what has several minibatches with what has one.
    """
    columns = list(COLUMNS)
    if any(timeline.schedule.num_minibatches > 1 for timeline in timelines):
        columns.insert(0, _PERIOD)
    measures = {"time": units.of_time(timelines), "memory": units.of_memory(timelines)}
    of = [measures.get(column.quantity, _BARE) for column in columns]
    competes = [ranked and timeline.schedule.num_minibatches == 1 for timeline in timelines]
    cells = [
        _cells(column, measure, [column.value(timeline) for timeline in timelines], competes)
        for column, measure in zip(columns, of, strict=True)
    ]
    return filled(
        "summary.html",
        headings=[(_heading(column, units, measure), column) for column, measure in zip(columns, of, strict=True)],
        rows=list(zip(map(named, timelines), zip(*cells, strict=True), strict=True)),
    )


def _cells(
    column: Column, measure: Measure, values: Sequence[Number], competes: Sequence[bool]
) -> list[tuple[str, str, bool, bool]]:
    """For each timeline its value to sort by, as it is shown, whether it is the best, and whether it has a bar."""
    rivals = [value for value, one_of_them in zip(values, competes, strict=True) if one_of_them]
    found = []
    for value, one_of_them in zip(values, competes, strict=True):
        best = one_of_them and column.quantity != "count" and _is_best(value, rivals)
        found.append((repr(float(value)), column.shown(value, measure), best, column.quantity == "share"))
    return found


def _heading(column: Column, units: Units, measure: Measure) -> str:
    unit = units.memory if column.quantity == "memory" and units.memory == "activations" else measure.unit
    return f"{column.heading}, {unit}" if unit else column.heading


def _is_best(value: Number, among: Sequence[Number]) -> bool:
    """The least, where they differ at all; floats that differ in their last bits do not."""
    low, high = float(min(among)), float(max(among))
    tolerance = 1e-9 * max(abs(low), abs(high))
    return high - low > tolerance and float(value) - low <= tolerance
