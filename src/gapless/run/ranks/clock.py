"""One time for all ranks: what a clock of another host must be moved by, so that a timeline of all devices makes sense.

Processes of one host share a clock. With another host, messages go there and back, and the quickest of some tells best:

    device 0   sent |-------------------------| back          its time there = (sent + back) / 2
    device k               | its time |
"""

import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gapless.run.lanes import Lane
from gapless.schedule.action import Schedule
from gapless.schedule.timeline import Timeline

_TAG = 0
_ROUNDS = 8


class SharedClock:
    """That of the ranks of a group. All of them make it, and ask it for the same."""

    def __init__(self, group: Any, device: int) -> None:
        self._group = group
        self._offset = offset(group, device)

    def timeline(self, schedule: Schedule, marks: Sequence[Any], lane: Lane) -> Timeline:
        """Of all devices, on every rank; `marks` are those of the lane of this one."""
        rows = schedule.rows
        # Seconds since long ago: 32 bits see milliseconds.
        mine = torch.zeros(1 + 2 * max(map(len, rows)), dtype=torch.float64)
        began = lane.began + self._offset
        spans = [(lane.seconds(start), lane.seconds(end)) for start, end in marks]
        times = [began, *(began + mark for span in spans for mark in span)]
        mine[: len(times)] = torch.tensor(times, dtype=torch.float64)
        found = [mine]
        if self._group is not None:
            found = [torch.empty_like(mine) for _ in rows]
            self._group.allgather([found], [mine]).wait()
        origin = min(float(row[0]) for row in found)
        moved = [
            [mark - origin for mark in times[1 : 1 + 2 * len(row)].tolist()]
            for times, row in zip(found, rows, strict=True)
        ]
        starts, ends = tuple(tuple(row[0::2]) for row in moved), tuple(tuple(row[1::2]) for row in moved)
        return Timeline(schedule, starts, ends, name="measured")


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
