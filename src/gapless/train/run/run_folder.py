"""The folder of a run: what it was asked for, what happened, its checkpoints and its report.

run.json        the config with all that holds, the pipeline and the machine
metrics.jsonl   a line for each step, evaluation and checkpoint
plan.json       the plan that was made for it, if one was
timelines.json  the last steps that were measured
checkpoints/    to go on from
tensorboard/    event files
report.html     all of it, to look at
"""

import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from gapless._version import __version__
from gapless.checkpoint.disk import HeldFolder, held_soon, is_aside, replace_file
from gapless.checkpoint.listing import saved_in
from gapless.errors import ConfigError
from gapless.pipeline.pipeline import Pipeline
from gapless.plan.plan import Plan
from gapless.schedule.action import Schedule
from gapless.schedule.timeline import Timeline
from gapless.train.config.config import Config

_LOCK_WITHIN = 5.0  # seconds
# Tables and keys that change no number that is trained.
_MAY_CHANGE = ("pipeline", "evaluate", "checkpoint", "run", "train.steps", "train.skip", "data.passes")
_THREADS = "threads of a device"


class RunFolder:
    """Where everything of a run is."""

    def __init__(self, path: Path) -> None:
        self.path, self.checkpoints, self.tensorboard = path, path / "checkpoints", path / "tensorboard"
        self.metrics, self.plan, self.report = path / "metrics.jsonl", path / "plan.json", path / "report.html"

    @property
    def has_checkpoints(self) -> bool:
        """There is something to go on from."""
        return self.checkpoints.is_dir() and bool(saved_in(self.checkpoints))

    @property
    def threads(self) -> int | None:
        """CPU threads of a device in the run that goes on: its bits may depend on them, so they stay."""
        said = self.said() if self.has_checkpoints else None
        found = None if said is None else said.get("environment", {}).get(_THREADS)
        return found if type(found) is int and found > 0 else None

    @property
    def missing(self) -> list[Path]:
        """What of it is not there yet, the innermost first."""
        return [each for each in (self.checkpoints, self.path, *self.path.parents) if not each.exists()]

    def open(self, config: Config) -> HeldFolder:
        """Make it, and hold it, where the file system has locks. One that holds a run of something else is refused: its
        numbers would be neither's.
        """
        with ExitStack() as stack:
            held = stack.enter_context(self._held())
            self._check(config)
            if held.locked:
                self._tidy()
            stack.pop_all()
            return held

    def _tidy(self) -> None:
        """Of a run that was killed while it wrote a file the half of it may be left, which nobody reads."""
        for entry in os.scandir(self.path):
            if is_aside(entry.name) and entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)

    def _held(self) -> HeldFolder:
        """A second run in the folder would write over the first."""
        try:
            return held_soon(self.path, _LOCK_WITHIN)
        except BlockingIOError:
            raise ConfigError(
                f"another run is training in {self.path}: wait for it or end it, or choose another folder with "
                "--folder or --fresh"
            ) from None
        except OSError as error:
            raise ConfigError(f"run.folder: {self.path} can't be made: {error.strerror or error}") from None

    def _check(self, config: Config) -> None:
        before = self.said()
        if before is None or not self.has_checkpoints:
            return
        changes = list(_changes(before["config"], json.loads(json.dumps(config.as_json(), default=str))))
        if changes:
            raise ConfigError(
                f"{self.path} holds a run with another config: {'; '.join(changes[:3])}: resume with that one, or "
                "choose another folder with --folder, or --fresh"
            )

    def say(self, config: Config, pipe: Pipeline, threads: int, ranks: int) -> None:
        """What was asked for, and of which machine."""
        facts = {
            "config": config.as_json(),
            "pipeline": repr(pipe),
            "schedule": pipe.schedule.text(),
            "environment": {
                "gapless": __version__,
                "torch": torch.__version__,
                "python": sys.version.split()[0],
                **_machine(),
                "processes": ranks,
                _THREADS: threads,
                "command": " ".join(sys.argv),
            },
        }
        replace_file(self.path / "run.json", json.dumps(facts, indent=1, default=str).encode())

    def where(self, pipe: Pipeline, threads: int, ranks: int) -> dict[str, str]:
        """On what it runs, as far as it may change when it is resumed."""
        kinds = Counter(each.type for each in pipe.devices)
        return {
            "schedule": pipe.schedule.name or "custom",
            "devices": ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
            "microbatches": str(pipe.schedule.num_microbatches),
            "processes": str(ranks),
            "machine": "; ".join(map(str, _machine().values())),
            _THREADS: str(threads),
        }

    def keep_plan(self, plan: Plan) -> None:
        """A run that goes on takes it again."""
        replace_file(self.plan, plan.text().encode())

    def said(self) -> dict[str, Any] | None:
        """What `say` wrote, if it did."""
        try:
            found = json.loads((self.path / "run.json").read_text("utf-8"))
            return found if isinstance(found, dict) and isinstance(found.get("config"), dict) else None
        except (OSError, ValueError):
            return None

    def keep_timelines(self, timelines: Sequence[Timeline]) -> None:
        """The last ones; all are of one schedule, or of those for smaller batches."""
        found = [
            {"schedule": each.schedule.text(), "name": each.schedule.name, "starts": each.starts, "ends": each.ends}
            for each in timelines
        ]
        replace_file(self.path / "timelines.json", json.dumps(found).encode())

    def timelines(self) -> list[Timeline]:
        """As they were kept."""
        try:
            kept = json.loads((self.path / "timelines.json").read_text("utf-8"))
        except (OSError, ValueError):
            return []
        return [
            Timeline(
                Schedule.parse(each["schedule"], name=each["name"]),
                tuple(map(tuple, each["starts"])),
                tuple(map(tuple, each["ends"])),
            )
            for each in kept
        ]


def _machine() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
    return {
        "system": platform.platform(),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "gpus": ", ".join(gpus) or "none",
    }


def folder_of(config: Config, asked: str | None, *, fresh: bool) -> RunFolder:
    """The one asked for; `fresh`: the next that holds no run yet."""
    path = Path(asked or config.run.folder or Path("runs") / config.name)
    if fresh:
        number, first = 1, path
        while (path / "run.json").exists():
            number += 1
            path = first.with_name(f"{first.name}-{number}")
    return RunFolder(path)


def _changes(old: Any, new: Any, name: str = "") -> Iterator[str]:
    """Of a table only what is not the same in it."""
    if name in _MAY_CHANGE:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            was, now = (each.get(key, None if name else {}) for each in (old, new))
            if was != now:
                yield from _changes(was, now, f"{name}.{key}" if name else key)
    else:
        was, now = ("not given" if value is None else f"{value!r:.40}" for value in (old, new))
        yield f"{name} was {was}, and is {now} now"
