"""The rows of a drawing: one for each device and, where activations go to the host, its copies out and back below it.

device 0     |F0|F1|F2|      |B0   |
  to host       |O0 |
  from host             |L0 |
"""

from dataclasses import dataclass, fields
from functools import cached_property
from operator import itemgetter

from gapless.schedule.action import COPIES, Action, Kind, Schedule
from gapless.schedule.costs import Number
from gapless.schedule.memory import Levels
from gapless.schedule.placement import explicit
from gapless.schedule.timeline import Timeline
from gapless.view import legend

_LANES = {Kind.OFFLOAD: "to host", Kind.LOAD: "from host"}


@dataclass(frozen=True, kw_only=True)
class Lanes(Timeline):
    """A timeline whose rows are those of a drawing. `devices` says whose each is."""

    of: Timeline
    labels: tuple[str, ...]
    devices: tuple[int, ...]

    @cached_property
    def memory(self) -> Levels:
        """That of the device; in the lanes of its copies that of the host."""
        if not self.of.schedule.has_copies:
            return self.of.memory
        found = []
        for row, device in zip(self.schedule.rows, self.devices, strict=True):
            levels = self.of.memory[device] if row and row[0].kind not in COPIES else self.of.host_memory[device]
            by_action = dict(zip(self.of.schedule.rows[device], levels, strict=True))
            found.append(tuple(by_action[action] for action in row))
        return tuple(found)

    @cached_property
    def peak(self) -> tuple[Number, ...]:
        copies = [bool(row) and row[0].kind in COPIES for row in self.schedule.rows]
        pairs = zip(copies, self.devices, strict=True)
        return tuple((self.of.host_peak if is_copy else self.of.peak)[device] for is_copy, device in pairs)

    @property
    def stages(self) -> list[tuple[int, ...]]:
        """Of each row's device."""
        return [tuple(self.of.schedule.placement.stages[device]) for device in self.devices]

    @property
    def tints(self) -> list[list[int]]:
        found = legend.tints(self.of.schedule)
        return [found[device] for device in self.devices]


def lanes_of(timeline: Timeline) -> Lanes:
    """The timeline as it is drawn."""
    schedule = timeline.schedule
    same = {field.name: getattr(timeline, field.name) for field in fields(Timeline)}
    if not schedule.has_copies:
        devices = tuple(range(schedule.num_devices))
        return Lanes(**same, of=timeline, labels=tuple(f"device {device}" for device in devices), devices=devices)
    labels, owners, rows = list[str](), list[int](), list[list[tuple[Action, Number, Number]]]()
    homes: dict[int, int] = {}  # the row of each device
    for device in range(schedule.num_devices):
        spans = timeline.spans(device)
        homes[device] = len(rows)
        lanes = {f"device {device}": [span for span in spans if span[0].kind not in COPIES]}
        for copy, label in _LANES.items():
            if found := [span for span in spans if span[0].kind is copy]:
                lanes[f"  {label}"] = sorted(found, key=itemgetter(1))
        labels += lanes
        owners += [device] * len(lanes)
        rows += lanes.values()
    cycles = [[homes[device] for device in cycle] for cycle in schedule.placement.cycles]
    same["schedule"] = Schedule.of([[a for a, _, _ in row] for row in rows], explicit(len(rows), cycles), schedule.name)
    same["starts"] = tuple(tuple(start for _, start, _ in row) for row in rows)
    same["ends"] = tuple(tuple(end for _, _, end in row) for row in rows)
    return Lanes(**same, of=timeline, labels=tuple(labels), devices=tuple(owners))
