"""One time for all ranks: what a clock of another host must be moved by, so that a timeline of all devices makes sense.

Processes of one host share a clock. With another host, messages go there and back, and the quickest of some tells best:

    device 0   sent |-------------------------| back          its time there = (sent + back) / 2
    device k               | its time |
"""

import time
import uuid
from pathlib import Path
from typing import Any

import torch

_TAG = 0
_ROUNDS = 8


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
        same = float(answer[1]) == _host()
    return 0.0 if same else best[1]


def _empty() -> torch.Tensor:
    return torch.empty(2, dtype=torch.float64)


def _now() -> torch.Tensor:
    return torch.tensor([time.perf_counter(), _host()], dtype=torch.float64)


def _host() -> float:
    """A number that processes of one host have in common: of what was started when the clock was."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    number = uuid.UUID(boot.read_text().strip()).int if boot.exists() else uuid.getnode()
    return float(number % (1 << 52))
