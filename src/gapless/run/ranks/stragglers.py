"""A device that is much slower than the others holds all of them up, and nothing else shows it: it is named in the log.

Compared is how long a device is busy in a step, waiting for others left out, each measured by what the plan has for it.
Rows are compared: the devices of one pipeline, and the same device of all replicas.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from gapless.run.ranks.seat import Seat
from gapless.schedule.action import Schedule
from gapless.schedule.costs import Costs

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


def compared(seat: Seat, pp: Any, dp: Any) -> list[Row]:
    """The rows that a rank is in, of which it has these groups."""
    devices = [f"rank {rank} (device {device})" for device, rank in enumerate(seat.pp_ranks)]
    replicas = [f"rank {rank} (replica {replica})" for replica, rank in enumerate(seat.dp_ranks)]
    return [Row(pp, seat.device, devices), Row(dp, seat.replica, replicas)]


class Pace:
    """Fed by every rank after each step. Whoever is first in a row names the slow ones, each once."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = [row for row in rows if row.group is not None]
        self._seconds: list[tuple[float, float]] = []
        self._under_way: list[tuple[Row, list[torch.Tensor], Any]] = []

    def note(self, busy: float, planned: float) -> None:
        """This rank was busy for so many seconds, of so much planned work. Nobody waits: what is compared at the end of
        one step is looked at after the next.
        """
        for row, found, work in self._under_way:
            work.wait()
            row.judge([(float(seconds), float(pace)) for seconds, pace in found])
        self._under_way.clear()
        self._seconds.append((busy, busy / planned))
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
