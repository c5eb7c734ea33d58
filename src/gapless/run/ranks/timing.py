"""Time on all ranks: one clock for timelines, and ranks that are slower than the others.

What a clock of another host must be moved by, so that a timeline of all devices makes sense: processes of one host
share a clock. With another host, messages go there and back, and the quickest of some tells best:

    device 0   sent |-------------------------| back          its time there = (sent + back) / 2
    device k               | its time |

A device that is much slower than the others holds all of them up, and nothing else shows it: it is named in the log.
Compared is how long a device is busy in a step, waiting for others left out, each measured by what the plan has for it.
Rows are compared: the devices of one pipeline, and the same device of all replicas.
"""

import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gapless.run.lanes import Lane
from gapless.run.program import Program
from gapless.run.ranks.mesh_position import Groups, MeshPosition
from gapless.run.ranks.wire.groups import of_each
from gapless.schedule.action import Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.timeline import Timeline

_TAG = 0
_ROUNDS = 8


class SharedClock:
    """That of the ranks of a pipeline, which all ask it for the same."""

    def __init__(self, groups: Groups, device: int) -> None:
        self._groups, self._device = groups, device
        self._offset: float | None = None

    def timeline(self, program: Program, lane: Lane) -> Timeline:
        """Of all devices, on every rank."""
        rows, marks = program.schedule.rows, program.marks[self._device]
        if self._offset is None:
            self._offset = offset(self._groups.pp, self._device)
        # Seconds since long ago: 32 bits see milliseconds.
        mine = torch.zeros(1 + 2 * max(map(len, rows)), dtype=torch.float64)
        began = lane.began + self._offset
        spans = [(lane.seconds(start), lane.seconds(end)) for start, end in marks]
        times = [began, *(began + mark for span in spans for mark in span)]
        mine[: len(times)] = torch.tensor(times, dtype=torch.float64)
        found = of_each(self._groups.pp, mine)
        origin = min(float(row[0]) for row in found)
        moved = [
            [mark - origin for mark in times[1 : 1 + 2 * len(row)].tolist()]
            for times, row in zip(found, rows, strict=True)
        ]
        starts, ends = tuple(tuple(row[0::2]) for row in moved), tuple(tuple(row[1::2]) for row in moved)
        return Timeline(program.schedule, starts, ends, name="measured", unit="s")


def offset(group: Any, device: int) -> float:
    """Seconds to add to this rank's `time.perf_counter` for that of device 0. All ranks of the group call it."""
    if group is None:
        return 0.0
    if device == 0:
        for other in range(1, group.size()):
            for _ in range(_ROUNDS):
                ball = _empty()
                group.recv([ball], other, _TAG).wait()
                group.send([_now()], other, _TAG).wait()
        return 0.0
    best, same = (float("inf"), 0.0), False
    for _ in range(_ROUNDS):
        answer = _empty()
        waiting = group.recv([answer], 0, _TAG)
        sent = time.perf_counter()
        group.send([_now()], 0, _TAG).wait()
        waiting.wait()
        back = time.perf_counter()
        best = min(best, (back - sent, float(answer[0]) - (sent + back) / 2))
        same = float(answer[1]) == host_number()
    return 0.0 if same else best[1]


def _empty() -> torch.Tensor:
    return torch.empty(2, dtype=torch.float64)


def _now() -> torch.Tensor:
    return torch.tensor([time.perf_counter(), host_number()], dtype=torch.float64)


def host_number() -> float:
    """A number that processes of one host have in common: of what was started when the clock was."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    number = uuid.UUID(boot.read_text().strip()).int if boot.exists() else uuid.getnode()
    return float(number % (1 << 52))


LOG = logging.getLogger("gapless")
_STEPS = 10  # of which the median counts
_TIMES = 3  # in a row, before it is said
_SLOW = 2.0  # times as slow as the others
_NOTICEABLE = 0.001  # seconds per step
_WORDS = (
    "gapless: %s is slow: it was busy for %.1f ms per step, where the others would take %.1f ms for the same planned "
    "work: it is slower than they are, or its stages have more to do than was planned"
)


@dataclass
class Row:
    """Ranks to compare: a group of gapless's own, in which this rank has a number, and what to call each."""

    group: Any
    number: int
    names: Sequence[str]

    def __post_init__(self) -> None:
        self.times = [0] * len(self.names)  # that each was slow, one after another

    def judge(self, measured: Sequence[tuple[float, float]]) -> None:
        """From the busy seconds of each, and these per planned work."""
        slow = stragglers(measured)
        for place, name in enumerate(self.names):
            if self.times[place] < _TIMES:
                self.times[place] = self.times[place] + 1 if place in slow else 0
                if self.times[place] == _TIMES and self.number == 0:
                    seconds, expected = slow[place]
                    LOG.warning(_WORDS, name, 1000 * seconds, 1000 * expected)


def compared(position: MeshPosition, pp: Any, dp: Any) -> list[Row]:
    """The rows that a rank is in, of which it has these groups."""
    devices = [f"rank {rank} (device {device})" for device, rank in enumerate(position.pp_ranks)]
    replicas = [f"rank {rank} (replica {replica})" for replica, rank in enumerate(position.dp_ranks)]
    return [Row(pp, position.device, devices), Row(dp, position.replica, replicas)]


class Pace:
    """Fed by every rank after each step. Whoever is first in a row names the slow ones, each once."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = [row for row in rows if row.group is not None]
        self._seconds: list[tuple[float, float]] = []
        self.planned: dict[int, float] = {}  # work of a step, by its number of microbatches
        self._under_way: list[tuple[Row, list[torch.Tensor], Any]] = []

    def note(self, busy: float, microbatches: int) -> None:
        """This rank was busy for so many seconds. Nobody waits: what is compared at the end of one step is looked at
        after the next.
        """
        for row, found, work in self._under_way:
            work.wait()
            row.judge([(float(seconds), float(pace)) for seconds, pace in found])
        self._under_way.clear()
        self._seconds.append((busy, busy / self.planned[microbatches]))
        if len(self._seconds) < _STEPS:
            return
        mine = torch.tensor([median(each) for each in zip(*self._seconds, strict=True)], dtype=torch.float64)
        self._seconds.clear()
        for row in self._rows:
            found = [torch.empty_like(mine) for _ in row.names]
            self._under_way.append((row, found, row.group.allgather([found], [mine])))


def stragglers(measured: Sequence[tuple[float, float]]) -> dict[int, tuple[float, float]]:
    """Who is twice as slow as the others: its seconds, and what the others would have taken."""
    found = {}
    for number, (seconds, pace) in enumerate(measured):
        usual = median(other for place, (_, other) in enumerate(measured) if place != number)
        expected = seconds * usual / pace if pace else 0.0
        if seconds >= _SLOW * expected and seconds - expected > _NOTICEABLE:
            found[number] = (seconds, expected)
    return found


def planned_work(schedule: Schedule, device: int, costs: Costs | None) -> float:
    """Of a device in one step, in the unit of the costs."""
    durations = (costs or Costs()).durations(schedule.placement)
    return float(sum(durations[action.kind][action.stage] for action in schedule.rows[device])) or 1.0
