"""Every n-th step is measured: who did what when, how large the bubble is and should be, and the memory in use."""

import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gapless.run.held_memory import in_use
from gapless.schedule.action import PER_MINIBATCH
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline, costs_of
from gapless.train.run.trainer import Callback, Step, Trainer
from gapless.train.torchrun import Ranks

_COLD = 2  # steps, in which buffers are made and kernels are chosen
_KEPT = 8  # timelines
_SELDOM = 500
_STATUS = Path("/proc/self/statm")


@dataclass(frozen=True)
class Measured:
    """What was measured in one step. Memory is in bytes, by device; of CPU devices that of their process."""

    step: int
    bubble: float
    predicted: float
    memory: dict[str, int]


class StepMonitor(Callback):
    """Asks for timelines, and keeps the last ones."""

    def __init__(self, every: int, ranks: Ranks) -> None:
        self._every, self._ranks = every, ranks
        self._forecast: tuple[float, float] | None = None
        self.timelines: deque[Timeline] = deque(maxlen=_KEPT)
        self.reading: Measured | None = None

    def on_begin(self, trainer: Trainer) -> None:
        number = trainer.step + 1
        trainer.pipe.timeline = bool(self._every) and number > _COLD and number % self._every == 0

    def on_step(self, trainer: Trainer, step: Step) -> None:
        if step.timeline is None:
            return
        self.timelines.append(_without_updates(step.timeline))
        memory: dict[str, int] = {}
        for each in self._ranks.gathered(_memory(trainer.pipe.devices, self._ranks)):
            memory |= each
        self.reading = Measured(step.number, float(self.timelines[-1].bubble), self._predicted(), memory)

    def _predicted(self) -> float:
        """From the costs of the measured actions, were the devices their own. Simulated again only where that takes
        less than a five-hundredth of the time since.
        """
        now = time.monotonic()
        if self._forecast is None or now > self._forecast[1]:
            bubble = float(simulate(self.timelines[-1].schedule, costs_of(list(self.timelines))).bubble)
            self._forecast = bubble, time.monotonic() + _SELDOM * (time.monotonic() - now)
        return self._forecast[0]


def _without_updates(timeline: Timeline) -> Timeline:
    """As the pipeline's own schedule has it."""
    rows = [
        [each for each in timeline.spans(n) if each[0].kind not in PER_MINIBATCH] for n in range(len(timeline.starts))
    ]
    schedule = timeline.schedule.with_rows([[action for action, _, _ in row] for row in rows])
    starts = tuple(tuple(start for _, start, _ in row) for row in rows)
    ends = tuple(tuple(end for _, _, end in row) for row in rows)
    return replace(timeline, schedule=schedule, starts=starts, ends=ends)


def _memory(devices: Sequence[torch.device], ranks: Ranks) -> dict[str, int]:
    """The most that each GPU of this process has held, and what the process itself holds."""
    where = "" if ranks.mesh is None else f"rank {ranks.rank} "
    gpus = sorted({each.index or 0 for each in devices if each.type == "cuda"})
    if gpus and ranks.mesh is not None:
        gpus = [torch.cuda.current_device()]
    found = {f"{where}cuda:{each}": in_use(torch.device("cuda", each))[1] for each in gpus}
    with suppress(OSError, ValueError, IndexError):  # which only Linux has
        found[f"{where}process"] = int(_STATUS.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return found
