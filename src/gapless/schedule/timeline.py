"""Who did what from when to when, simulated or measured: one type for both, so that they can be laid side by side.

Two bubbles, never mixed up. The *makespan* bubble is what a step costs when the optimizer waits for all devices; the
*span* bubble is what remains when the next step may start on a device before the others have ended.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from operator import sub
from typing import Any, Literal

from gapless.schedule import host_copies, memory
from gapless.schedule.action import COPIES, PER_MINIBATCH, TRANSFERS, Action, Kind, Schedule
from gapless.schedule.costs import Costs, Number
from gapless.schedule.memory import Levels

Objective = Literal["makespan", "span"]


@dataclass(frozen=True)
class Timeline:
    """Per device, in the order of its row, when each action started and ended."""

    schedule: Schedule
    starts: tuple[tuple[Number, ...], ...]
    ends: tuple[tuple[Number, ...], ...]
    costs: Costs = field(default_factory=Costs)
    name: str = ""
    unit: Literal["", "s"] = ""  # seconds, if it was measured
    clock: float | None = None  # when its devices began to count, by the host; None if that is not known

    def __repr__(self) -> str:
        """Three lines: what it is, how long it takes, what it holds."""
        schedule = self.schedule
        sizes = (
            f"{schedule.num_devices} devices, {schedule.num_stages} stages, {schedule.num_microbatches} microbatches"
        )
        unit = f" {self.unit}".rstrip()
        shown = {name: f"{plain(getattr(self, name)):.6g}{unit}" for name in ("makespan", "span", "work")}
        times = ", ".join(f"{name} {value}" for name, value in shown.items())
        return (
            f"Timeline of {self.name or 'a schedule'}: {sizes}, {schedule.num_actions:,} actions\n"
            f"  {times}; bubble {float(self.bubble):.1%}, span bubble {float(self.span_bubble):.1%}\n"
            f"  peak of each device: {', '.join(f'{plain(peak):.6g}' for peak in self.peak)}"
        )

    @cached_property
    def start(self) -> Number:
        """The first start of all. Drawings count from it, so that measured and simulated ones have the same axis."""
        return min((row[0] for row in self.starts if row), default=0)

    @cached_property
    def makespan(self) -> Number:
        """From the first start of all to the last end of all."""
        return max((row[-1] for row in self.ends if row), default=0) - self.start

    @cached_property
    def span(self) -> Number:
        """The longest time from a device's own first start to its own last end."""
        found: list[Number] = [0]
        for row, starts, ends in zip(self.schedule.rows, self.starts, self.ends, strict=True):
            work = (start for action, start in zip(row, starts, strict=True) if action.kind not in TRANSFERS)
            found += [ends[-1] - start for start in islice(work, 1)]  # not a receive that is posted ahead of it
        return max(found)

    @cached_property
    def busy(self) -> tuple[Number, ...]:
        """The time each device spent in actions, without copies beside them."""
        if self.schedule.has_copies:
            each = map(self.spans, range(self.schedule.num_devices))
            return tuple(sum(end - start for a, start, end in row if a.kind not in COPIES) for row in each)
        rows = zip(self.starts, self.ends, strict=True)
        return tuple(sum(map(sub, ends, starts)) for starts, ends in rows)

    @property
    def idle(self) -> tuple[Number, ...]:
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def work(self) -> Number:
        """The busy time of the busiest device: no order of the actions can take less."""
        return max(self.busy, default=0)

    @property
    def bubble(self) -> Number:
        """The share of the makespan in which even the busiest device has nothing to do."""
        return _share(self.makespan - self.work, self.makespan)

    @property
    def span_bubble(self) -> Number:
        return _share(self.span - self.work, self.span)

    @cached_property
    def peak(self) -> tuple[Number, ...]:
        """The most each device holds, in the unit of the costs' `activation`."""
        if self.schedule.has_copies:
            return tuple(max((held for held, _ in row), default=0) for row in self.memory)
        return memory.peaks(self.schedule, self.costs)

    @cached_property
    def host_memory(self) -> Levels:
        """Per device and action: what is in host memory while it runs, and after it has ended."""
        return host_copies.host_levels(self.schedule, self.costs, self.starts, self.ends)

    @property
    def host_peak(self) -> tuple[Number, ...]:
        """The most each device has in host memory."""
        return tuple(max((held for held, _ in row), default=0) for row in self.host_memory)

    @cached_property
    def memory(self) -> Levels:
        """Per device and action: what is held while it runs, and after it has ended."""
        if self.schedule.has_copies:
            return host_copies.levels(self.schedule, self.costs, self.starts, self.ends)
        return memory.levels(self.schedule, self.costs)

    @cached_property
    def minibatch_ends(self) -> tuple[Number, ...]:
        """When the last action of each minibatch ended."""
        count = self.schedule.num_minibatches
        per_minibatch = max(1, self.schedule.num_microbatches // count)
        last: list[Number] = [0] * count
        for action, _, end in self.all_spans:
            number = action.microbatch if action.kind in PER_MINIBATCH else action.microbatch // per_minibatch
            number = min(number, count - 1)  # what is left over where the updates do not divide the microbatches
            last[number] = max(last[number], end)
        return tuple(last)

    @property
    def period(self) -> Number:
        """Time per minibatch: the makespan, or for several minibatches the steady pace in the middle half of them."""
        ends = sorted(self.minibatch_ends)
        if len(ends) == 1:
            return self.makespan
        first, last = len(ends) // 4, len(ends) - 1 - len(ends) // 4
        return (ends[last] - ends[first]) / (last - first)

    def spans(self, device: int) -> list[tuple[Action, Number, Number]]:
        return list(zip(self.schedule.rows[device], self.starts[device], self.ends[device], strict=True))

    @property
    def all_spans(self) -> Iterator[tuple[Action, Number, Number]]:
        """Those of one device after another."""
        return chain.from_iterable(map(self.spans, range(self.schedule.num_devices)))

    def summary(self) -> dict[str, Any]:
        """The numbers of this timeline as plain JSON values."""
        schedule = self.schedule
        per_minibatch = schedule.num_microbatches // schedule.num_minibatches
        found: dict[str, Any] = {
            "schedule": self.name or schedule.name,
            "devices": schedule.num_devices,
            "stages": schedule.num_stages,
            "placement": schedule.placement.shape,
            # Of one minibatch; where each has only one (pipedream), all of them.
            "microbatches": per_minibatch if per_minibatch > 1 else schedule.num_microbatches,
            "minibatches": schedule.num_minibatches,
            **{name: plain(getattr(self, name)) for name in ("makespan", "span", "work", "bubble", "span_bubble")},
            **{name: list(map(plain, getattr(self, name))) for name in ("busy", "idle", "peak")},
            "actions": schedule.num_actions,
        }
        if schedule.has_copies:
            found["host_peak"] = list(map(plain, self.host_peak))
        if schedule.num_minibatches > 1:
            found["period"] = plain(self.period)
            found["throughput"] = plain(1 / self.period) if self.period else None
        return found


def plain(number: Number) -> int | float:
    """A number as JSON has it: whole ones without a point, others without the noise of adding up floats."""
    value = float(number)
    if not value.is_integer():
        value = float(f"{value:.12g}")
    return int(value) if value.is_integer() else value


def _share(part: Number, whole: Number) -> Number:
    return part / whole if whole else 0


def costs_of(timelines: Timeline | Sequence[Timeline]) -> Costs:
    """Per stage the median time of each kind of action, in one timeline or several.

    Where a stage ran only whole backwards, half of one is taken for an I and half for a W; where it ran only halves, a
    whole one is taken for both together.
    """
    timelines = (timelines,) if isinstance(timelines, Timeline) else timelines
    taken: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        for action, start, end in timeline.all_spans:
            taken[action.kind, action.stage].append(float(end - start))
    median = {place: statistics.median(seconds) for place, seconds in taken.items()}
    stages = range(timelines[0].schedule.num_stages)
    whole = [median.get((Kind.BACKWARD, stage)) for stage in stages]
    halves = [(median.get((Kind.INPUT_GRAD, stage)), median.get((Kind.WEIGHT_GRAD, stage))) for stage in stages]
    inputs = [i if i is not None else (b or 0) / 2 for (i, _), b in zip(halves, whole, strict=True)]
    weights = [w if w is not None else (b or 0) / 2 for (_, w), b in zip(halves, whole, strict=True)]
    return Costs(
        forward=[median.get((Kind.FORWARD, stage), 0) for stage in stages],
        input_grad=inputs,
        weight_grad=weights,
        backward=[b if b is not None else i + w for b, i, w in zip(whole, inputs, weights, strict=True)],
        recompute=[median.get((Kind.RECOMPUTE, stage), 0) for stage in stages],
    )
