"""What the numbers on a page count: nothing in particular where costs are made up, time and bytes where they are real.

A page has one unit for all its times and one for all its memory, so that they can be compared at a glance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gapless.schedule.costs import Number
from gapless.schedule.timeline import Timeline, plain

# From the smallest: what a timeline's number is multiplied by, the unit, and the least that is shown in it.
_TIMES = ((1e6, "µs", 0.0), (1e3, "ms", 1e-3), (1.0, "s", 10.0))
_SIZES = ((2.0**-10, "KiB", 0.0), (2.0**-20, "MiB", 2.0**20), (2.0**-30, "GiB", 10 * 2.0**30))


def figure(number: Number) -> str:
    """Seven digits at most, thousands apart, no trailing zeros."""
    value = plain(number)
    if isinstance(value, int):
        return f"{value:,}"
    if not 1e-4 <= abs(value) < 1e7:
        return f"{value:.6g}"
    return _digits(value, 7)


def _digits(value: float, digits: int) -> str:
    whole = len(str(int(abs(value))))
    shown = f"{value:,.{max(0, digits - whole)}f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


@dataclass(frozen=True)
class Measure:
    """A factor, and the unit that a number has once it is multiplied by it."""

    factor: float = 1.0
    unit: str = ""

    def number(self, value: Number) -> str:
        """Exact where there is no unit; what was measured has four digits that mean something."""
        return _digits(float(value) * self.factor, 4) if self.unit else figure(value)

    def text(self, value: Number) -> str:
        """The number with its unit."""
        return f"{self.number(value)} {self.unit}" if self.unit else figure(value)


@dataclass(frozen=True)
class Units:
    """In what the timelines of a page count: "" for costs that are just numbers."""

    time: Literal["", "s"] = ""
    memory: Literal["", "bytes", "activations"] = ""

    def of_time(self, timelines: Sequence[Timeline]) -> Measure:
        """The unit in which the longest makespan is a number people read."""
        return _chosen(_TIMES, max((float(t.makespan) for t in timelines), default=0.0)) if self.time else Measure()

    def of_memory(self, timelines: Sequence[Timeline]) -> Measure:
        """The unit in which the highest peak is one."""
        if self.memory == "bytes":
            return _chosen(_SIZES, max((float(peak) for t in timelines for peak in t.peak), default=0.0))
        return Measure()


def _chosen(choices: Sequence[tuple[float, str, float]], most: float) -> Measure:
    factor, unit, _ = next(choice for choice in reversed(choices) if most >= choice[2])
    return Measure(factor, unit)
