"""Timelines as a trace for ui.perfetto.dev and chrome://tracing, beside the traces of a profiler.

A timeline is a process, a device is a thread of it. An arrow goes from an action to each that needs it on another
device, and a counter per device tells what it holds. Times are in microseconds; a unit of cost is a millisecond unless
said otherwise.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

from gapless.errors import ConfigError, ScheduleError
from gapless.schedule.action import BACKWARDS, Kind
from gapless.schedule.timeline import Timeline
from gapless.view import legend
from gapless.view.columns import resolve, row_offsets
from gapless.view.host_lanes import Lanes, lanes_of
from gapless.view.summary import named

UNITS = {"s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3}
_INSIDE = 0.01  # how far from its ends an arrow touches a slice: at the very end it could belong to the next one
_GRADIENTS = BACKWARDS | {Kind.SEND_GRADIENT}
_BATCH = 10_000

_BYTES_PER_ACTION = 400  # with its share of arrows and counters, about
_MANY_BYTES = 100 * 2**20  # takes a browser a while
MAX_BYTES = 2**31  # no browser opens more: its viewer has 4 GiB of memory, and needs more than the file has

Event = dict[str, Any]


def about_its_size(timelines: Sequence[Timeline]) -> str | None:
    """A warning for those who ask for a trace that is large."""
    total, size = _size(timelines)
    if not _MANY_BYTES < size <= MAX_BYTES:
        return None
    return (
        f"{total:,} actions make a trace of about {size / 2**20:,.0f} MiB, which ui.perfetto.dev opens slowly: use "
        "--html, which draws millions in a small file, or fewer microbatches"
    )


def _size(timelines: Sequence[Timeline]) -> tuple[int, int]:
    total = sum(timeline.schedule.num_actions for timeline in timelines)
    return total, total * _BYTES_PER_ACTION


def write(path: str | Path, timelines: Sequence[Timeline], unit: str = "ms") -> None:
    """The trace as a file, a batch of events at a time: a long one never is in memory as a whole."""
    found = events(timelines, unit)
    total, size = _size(timelines)
    if size > MAX_BYTES:
        raise ScheduleError(
            f"{total:,} actions would make a trace of about {size / 2**20:,.0f} MiB, and ui.perfetto.dev opens no more "
            f"than {MAX_BYTES / 2**20:,.0f} MiB: use --html, which draws millions, or fewer microbatches"
        )
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = ""
        while batch := list(islice(found, _BATCH)):
            file.write(separator + ",\n".join(json.dumps(event, separators=(",", ":")) for event in batch))
            separator = ",\n"
        file.write("\n]}\n")


def events(timelines: Sequence[Timeline], unit: str = "ms") -> Iterator[Event]:
    """Checks its arguments at once, and makes the events one after the other."""
    if not timelines:
        raise ScheduleError("there is no timeline to trace: give at least one")
    if unit not in UNITS:
        raise ConfigError(f"unit is {unit!r}, but a unit of time is one of {', '.join(UNITS)}")
    return _events(timelines, UNITS[unit])


def _events(timelines: Sequence[Timeline], scale: float) -> Iterator[Event]:
    flow = count(1)
    for process, timeline in enumerate(map(lanes_of, timelines), 1):
        yield from _names(timeline, process)
        slices = _Slices(timeline, process, scale)
        yield from slices.events()
        yield from _counters(timeline, slices)
        yield from _arrows(timeline, slices, flow)


def _names(timeline: Lanes, process: int) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": named(timeline)}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for row, (label, stages) in enumerate(zip(timeline.labels, timeline.stages, strict=True)):
        held = f"stage{'' if len(stages) == 1 else 's'} {', '.join(map(str, stages))}" if stages else "no stage"
        name = f"{label} ({held})" if label.startswith("device") else f"device {timeline.devices[row]}{label[1:]}"
        thread = {"pid": process, "tid": row + 1}
        yield {"ph": "M", "name": "thread_name", **thread, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": row}}


class _Slices:
    """The actions of one timeline in microseconds, by their numbers."""

    def __init__(self, timeline: Timeline, process: int, scale: float) -> None:
        self.timeline, self.process = timeline, process
        first = timeline.start
        self.starts = [float(start - first) * scale for row in timeline.starts for start in row]
        self.ends = [float(end - first) * scale for row in timeline.ends for end in row]
        self.offsets = row_offsets(timeline.schedule)
        rows = timeline.schedule.rows
        self.devices = [device for device, row in enumerate(rows) for _ in row]

    def events(self) -> Iterator[Event]:
        for number, action in enumerate(self.timeline.schedule.actions):
            yield {
                "ph": "X",
                "name": str(action),
                "cat": legend.ENTRIES[action.kind].name,
                **self.thread(number),
                "ts": self.starts[number],
                "dur": self.ends[number] - self.starts[number],
                "args": {"stage": action.stage, legend.counted(action.kind): action.microbatch},
            }

    def thread(self, number: int) -> Event:
        return {"pid": self.process, "tid": self.devices[number] + 1}

    def inside(self, number: int, share: float) -> float:
        return self.starts[number] + share * (self.ends[number] - self.starts[number])


def _counters(timeline: Lanes, slices: _Slices) -> Iterator[Event]:
    """What a device holds, at each time it changes; of several changes in one moment the last."""
    for device, levels in enumerate(timeline.memory):
        first = slices.offsets[device]
        held: dict[float, float] = {}
        for number, (during, after) in enumerate(levels, first):
            held[slices.starts[number]] = float(during)
            held[slices.ends[number]] = float(after)
        last = None
        for time, value in held.items():
            if value != last:
                whose = timeline.labels[device]
                lane = "" if whose.startswith("device") else f" {whose.strip()}"
                name = f"memory of device {timeline.devices[device]}{lane}"
                yield {"ph": "C", "name": name, "pid": slices.process, "ts": time, "args": {"held": value}}
            last = value


def _arrows(timeline: Timeline, slices: _Slices, flow: Iterator[int]) -> Iterator[Event]:
    needs = resolve(timeline.schedule)
    made = list(timeline.schedule.actions)
    for number in range(len(made)):
        for need in needs.of(number):
            if slices.devices[need] == slices.devices[number]:
                continue
            what = "gradient" if made[need].kind in _GRADIENTS else "activation"
            common = {"name": what, "cat": "dependency", "id": next(flow)}
            leaves, arrives = slices.inside(need, 1 - _INSIDE), slices.inside(number, _INSIDE)
            yield {"ph": "s", **common, **slices.thread(need), "ts": leaves}
            yield {"ph": "f", "bp": "e", **common, **slices.thread(number), "ts": arrives}
