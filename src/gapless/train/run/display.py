"""A run as one watches it: a live display on a terminal, plain lines elsewhere."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from gapless.errors import printable
from gapless.train.run.step_monitor import StepMonitor
from gapless.train.run.trainer import Callback, Step, Trainer
from gapless.units import show_bytes, show_count

_EVERY = 5.0  # seconds between two lines
_RECENT = 64  # steps that speed is taken from
_CURVE = 40  # losses that are drawn
_BARS = "▁▂▃▄▅▆▇█"


class Speed:
    """How fast the last steps were. The first one of this process is left out as soon as there are others: it is cold.

    A thread that draws may ask at any time, so there is always a step, and what is gone through is a copy.
    """

    def __init__(self) -> None:
        self._recent = deque[Step](maxlen=_RECENT)
        self._is_cold = False  # the first is all there is

    def add(self, step: Step) -> None:
        self._recent.append(step)
        if self._is_cold:
            self._recent.popleft()
        self._is_cold = not self._is_cold and len(self._recent) == 1

    @property
    def seconds(self) -> float:
        """Of a step, with what it waited for data."""
        return statistics.median([step.seconds for step in tuple(self._recent)])

    def speed(self) -> str:
        """In tokens where the data has some."""
        recent = tuple(self._recent)
        total = sum(step.seconds for step in recent)
        if all(step.tokens is not None for step in recent):
            return f"{sum(step.tokens or 0 for step in recent) / total:,.4g} tokens/s"
        return f"{sum(step.samples for step in recent) / total:.4g} samples/s"


class Lines(Callback):
    """The first step, the last one, and about every 5 s one between them."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._pace = say, Speed()
        self._shown = time.monotonic()
        self._last: Step | None = None
        self._told = 0

    def on_step(self, trainer: Trainer, step: Step) -> None:
        self._pace.add(step)
        self._last = step
        if step.skipped:
            self._say(f"{_place(trainer, step.number)} left the weights as they were: {step.skipped}")
        if self._told == 0 or step.number == trainer.steps or time.monotonic() - self._shown >= _EVERY:
            self._tell(trainer, step)

    def on_evaluate(self, trainer: Trainer, loss: float, seconds: float) -> None:
        self._say(f"{_place(trainer, trainer.step)}   evaluation {loss:.4g}")

    def on_save(self, trainer: Trainer, path: str, seconds: float) -> None:
        if trainer.ended:
            self._tell_last(trainer)
        self._say(f"{_place(trainer, trainer.step)}   saved {path}")

    def on_end(self, trainer: Trainer) -> None:
        if trainer.ended:
            self._tell_last(trainer)

    def _tell_last(self, trainer: Trainer) -> None:
        if self._last is not None and self._told != self._last.number:
            self._tell(trainer, self._last)

    def _tell(self, trainer: Trainer, step: Step) -> None:
        self._say(
            f"{_place(trainer, step.number)}   loss {step.loss:<8.4g} "
            f"{1000 * self._pace.seconds:7.1f} ms per step   {self._pace.speed()}"
        )
        self._shown, self._told = time.monotonic(), step.number


def _place(trainer: Trainer, step: int) -> str:
    return f"step {step:>{len(str(trainer.steps))}} of {trainer.steps}"


class Live(Callback):
    """A panel at the end of the terminal, drawn once a second: each time takes about 3 ms of a processor."""

    def __init__(self, title: str, monitor: StepMonitor, console: Any = None) -> None:
        from rich.console import Console
        from rich.live import Live as Shown
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self._title, self._monitor, self._pace = title, monitor, Speed()
        self._losses: deque[float] = deque(maxlen=_CURVE)
        self._notes: list[str] = []
        self._skipped = 0
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=None), TaskProgressColumn(), expand=True
        )
        self._task = self._progress.add_task("", total=None)
        self._evaluation = self._saved = ""
        self._step: Step | None = None
        self._steps = 0
        self._live = Shown(
            console=console or Console(), get_renderable=self._drawn, refresh_per_second=1, transient=False
        )

    def on_start(self, trainer: Trainer) -> None:
        self._steps = trainer.steps
        self._progress.update(self._task, total=trainer.steps, completed=trainer.step)
        self._live.start()

    def on_step(self, trainer: Trainer, step: Step) -> None:
        self._pace.add(step)
        self._losses.append(step.loss)
        self._step = step
        self._skipped += bool(step.skipped)
        self._progress.update(self._task, completed=step.number)

    def on_evaluate(self, trainer: Trainer, loss: float, seconds: float) -> None:
        self._evaluation = f"{loss:.4g} at step {trainer.step}"

    def on_save(self, trainer: Trainer, path: str, seconds: float) -> None:
        self._saved = f"{path} in {seconds:.2g} s"

    def on_end(self, trainer: Trainer) -> None:
        self._live.stop()

    def _drawn(self) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        rows = Table.grid(padding=(0, 2))
        step = self._step
        if step is not None:
            left = timedelta(seconds=round((self._steps - step.number) * self._pace.seconds))
            rows.add_row("loss", f"{step.loss:.4g}  {curve(tuple(self._losses))}")
            rows.add_row("speed", f"{self._pace.speed()}, {1000 * self._pace.seconds:.4g} ms per step, {left} left")
            norm = "" if step.norm is None else f", gradient norm {step.norm:.3g}"
            rows.add_row("learning rate", f"{step.rate:.3g}{norm}")
        if self._evaluation:
            rows.add_row("evaluation", self._evaluation)
        if (reading := self._monitor.reading) is not None:
            rows.add_row("bubble", f"{reading.bubble:.1%} measured, {reading.predicted:.1%} predicted")
            rows.add_row("memory", ", ".join(f"{name} {show_bytes(size)}" for name, size in reading.memory.items()))
        if self._saved:
            rows.add_row("checkpoint", self._saved)
        if self._skipped:
            rows.add_row("left out", f"{show_count(self._skipped, 'update')} whose loss or gradients were not finite")
        done = 0 if step is None else step.number
        self._progress.update(self._task, description=f"step {done:,} of {self._steps:,}")
        return Panel(Group(self._progress, rows), title=Text(printable(self._title)), border_style="dim")


def curve(values: Sequence[float]) -> str:
    """The last values as small bars."""
    known = [value for value in values if value == value and abs(value) < float("inf")]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in known)
