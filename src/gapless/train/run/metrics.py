"""What happens in a run, one JSON object per line, and the same for TensorBoard and Weights & Biases.

    {"step": 20, "loss": 2.77, "rate": 0.003, "norm": 1.2, "samples": 16, "tokens": 512, "seconds": 0.17, ...}
    {"step": 50, "evaluation": 2.81, "seconds": 0.4}
    {"step": 50, "saved": "checkpoints/step-00000050", "seconds": 0.1}

A resumed run drops the lines of the steps that it repeats, and says on what it continues:

    {"step": 50, "started": {"devices": "2 cpu", "schedule": "1f1b", "microbatches": "8", "machine": "..."}}
"""

import json
import math
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from gapless.checkpoint.disk import naming, replace_file
from gapless.train.run.step_monitor import StepMonitor
from gapless.train.run.trainer import Callback, Step, Trainer

_DRAW = 1.0  # seconds


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a run; one that a killed process left half is not there."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    found = json.loads(line)
                except ValueError:
                    continue
                if isinstance(found, dict) and isinstance(found.get("step"), int):
                    yield found
    except FileNotFoundError:
        return


@dataclass(frozen=True)
class RunPart:
    """A stretch of a run on the same devices and machine, with the same schedule."""

    after: int  # the step after which it begins
    where: dict[str, str]
    lines: list[dict[str, Any]]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "loss" in line]

    @property
    def warm_steps(self) -> list[dict[str, Any]]:
        """Without the first of each process, if there are others."""
        found, is_cold = [], True
        for line in self.lines:
            if "loss" in line and not is_cold:
                found.append(line)
            is_cold = "started" in line or (is_cold and "loss" not in line)
        return found or self.steps


def parts_of(lines: Iterable[dict[str, Any]]) -> list[RunPart]:
    """One, unless the run was resumed on something else."""
    found = [RunPart(0, {}, [])]
    for line in lines:
        where = line.get("started")
        if where is not None and not found[-1].steps:
            found[-1] = RunPart(line["step"], where, found[-1].lines)
        elif where is None or where == found[-1].where:
            found[-1].lines.append(line)
        else:
            found.append(RunPart(line["step"], where, []))
    return found if len(found) == 1 or found[-1].steps else found[:-1]


class Metrics(Callback):
    """Writes the lines."""

    def __init__(self, path: Path, monitor: StepMonitor | None = None, where: dict[str, str] | None = None) -> None:
        self._path, self._monitor, self._where = path, monitor, where or {}
        self._file: TextIO | None = None

    def on_start(self, trainer: Trainer) -> None:
        before = read_metrics(self._path)
        kept = [
            line for line in before if line["step"] < trainer.step + ("started" not in line) and "ended" not in line
        ]
        replace_file(self._path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        # Line by line: one that a killed process still held would be missing before the checkpoint that came after it.
        self._file = self._path.open("a", buffering=1, encoding="utf-8")
        self._write({"step": trainer.step, "started": self._where})

    def on_step(self, trainer: Trainer, step: Step) -> None:
        self._write(facts_of(step, self._monitor))

    def on_evaluate(self, trainer: Trainer, loss: float, seconds: float) -> None:
        self._write({"step": trainer.step, "evaluation": loss, "seconds": seconds})

    def on_save(self, trainer: Trainer, path: str, seconds: float) -> None:
        self._write({"step": trainer.step, "saved": path, "seconds": seconds})

    def on_end(self, trainer: Trainer) -> None:
        if self._file is not None:
            with nullcontext() if trainer.ended else suppress(OSError):  # nothing hides what came first
                self._write({"step": trainer.step, "ended": trainer.ended or "an error"})
                self._file.close()
            self._file = None

    def _write(self, facts: dict[str, Any]) -> None:
        assert self._file is not None
        plain = {key: _number(key, value) for key, value in facts.items()}
        with naming(self._path):
            self._file.write(json.dumps({**plain, "time": round(time.time(), 3)}) + "\n")


def facts_of(step: Step, monitor: StepMonitor | None) -> dict[str, Any]:
    """A step as the lines have it; what is None is left out."""
    names = ("loss", "rate", "norm", "samples", "tokens", "seconds", "waited", "updated")
    facts: dict[str, Any] = {"step": step.number, **{name: getattr(step, name) for name in names}}
    facts["skipped"] = step.skipped or None
    if monitor is not None and monitor.reading is not None and monitor.reading.step == step.number:
        reading = monitor.reading
        facts |= {"bubble": reading.bubble, "predicted_bubble": reading.predicted, "memory": reading.memory}
    return {key: value for key, value in facts.items() if value is not None}


def _number(key: str, value: Any) -> Any:
    """Times to the microsecond, all else to the last bit. JSON has no nan and no infinity, so these become words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return round(value, 6) if key in ("seconds", "waited", "updated") else value


class _Scalars(Callback):
    """Numbers for a program that draws them."""

    def __init__(self, monitor: StepMonitor | None) -> None:
        self._monitor = monitor
        self._drawn = 0.0

    def on_step(self, trainer: Trainer, step: Step) -> None:
        """Once a second is enough to look at, and takes no time from short steps; the JSON lines have all of them."""
        if step.timeline is None and time.monotonic() - self._drawn < _DRAW:
            return
        self._drawn = time.monotonic()
        facts = facts_of(step, self._monitor)
        facts |= {f"memory/{name}": size for name, size in facts.pop("memory", {}).items()}
        self.draw(step.number, {key: value for key, value in facts.items() if isinstance(value, int | float)})

    def on_evaluate(self, trainer: Trainer, loss: float, seconds: float) -> None:
        self.draw(trainer.step, {"evaluation": loss})

    def draw(self, step: int, numbers: dict[str, float]) -> None:
        raise NotImplementedError


class TensorBoard(_Scalars):
    """Event files in a folder of their own."""

    def __init__(self, folder: Path, monitor: StepMonitor | None) -> None:
        super().__init__(monitor)
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._kind = folder, SummaryWriter
        self._writer: SummaryWriter | None = None

    def on_start(self, trainer: Trainer) -> None:
        self._writer = self._kind(str(self._folder), purge_step=trainer.step + 1 if trainer.step else None)

    def draw(self, step: int, numbers: dict[str, float]) -> None:
        assert self._writer is not None
        for name, value in numbers.items():
            if name != "step":
                self._writer.add_scalar(name, value, step)

    def on_end(self, trainer: Trainer) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases(_Scalars):
    """A run of a project there. Its own name and account are wandb's affair."""

    def __init__(self, project: str, name: str, config: dict[str, Any], monitor: StepMonitor | None) -> None:
        super().__init__(monitor)
        import wandb

        self._run = wandb.init(project=project, name=name, config=config, resume="allow")

    def draw(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def on_end(self, trainer: Trainer) -> None:
        self._run.finish(exit_code=0 if trainer.ended else 1)


def summary_of(path: Path, since: int = 0) -> dict[str, Any]:
    """Of all steps of a run, from its lines. Timed are those after step `since`, but not the first, which is cold."""
    steps = [line for line in read_metrics(path) if "loss" in line]
    recent = [line for line in steps if line["step"] > since]
    timed = [line for line in recent[1:] or recent if isinstance(line.get("seconds"), float)]
    evaluations = [line["evaluation"] for line in read_metrics(path) if "evaluation" in line]
    total = sum(line["seconds"] for line in timed)
    return {
        "steps": len(steps),
        "loss": float(steps[-1]["loss"]) if steps else math.nan,
        "losses": [float(line["loss"]) for line in steps],
        "evaluation": float(evaluations[-1]) if evaluations else None,
        "step_seconds": statistics.median(line["seconds"] - line["waited"] for line in timed) if timed else math.nan,
        "samples_per_second": sum(line["samples"] for line in timed) / total if total else math.nan,
    }
