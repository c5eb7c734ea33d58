"""When a run is saved: after so many steps or minutes, and at its end. And how it goes on from what was saved."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gapless.checkpoint.collection import Checkpoints
from gapless.errors import CheckpointError
from gapless.train.config.config import Config
from gapless.train.data.feed import Feed
from gapless.train.run.evaluation import EarlyStop
from gapless.train.run.trainer import Callback, Trainer
from gapless.train.torchrun import Ranks

_MINUTES = 10.0  # between two saves, unless told otherwise


class Saver(Callback):
    """Saves before the next step begins, when the step before it has been evaluated. On ranks all save, and the first
    one says when, where it depends on the time.
    """

    def __init__(self, store: Checkpoints, config: Config, early: EarlyStop, ranks: Ranks) -> None:
        self._store, self._keys, self._early, self._ranks = store, config.checkpoint, early, ranks
        self._metric: tuple[int, float] | None = None
        self._saved: int | None = None  # the step
        self._since = time.monotonic()

    def on_begin(self, trainer: Trainer) -> None:
        if trainer.step > 0 and trainer.step != self._saved and self._is_time(trainer.step):
            trainer.settle()
            self._save(trainer)

    def on_evaluate(self, trainer: Trainer, loss: float, seconds: float) -> None:
        self._metric = trainer.step, loss

    def on_end(self, trainer: Trainer) -> None:
        """Where an exception ended it, what was saved before is what counts."""
        if trainer.ended:
            if trainer.step != self._saved:
                self._save(trainer)
            self._store.wait()

    def _is_time(self, step: int) -> bool:
        if self._keys.every is not None and step % self._keys.every == 0:
            return True
        minutes = self._keys.minutes or (_MINUTES if self._keys.every is None else None)
        if minutes is None:
            return False
        return self._ranks.decided(time.monotonic() - self._since >= 60 * minutes)

    def _save(self, trainer: Trainer) -> None:
        begin = time.perf_counter()
        metric = self._metric[1] if self._metric is not None and self._metric[0] == trainer.step else None
        path = self._store.save(trainer.optimizer, trainer.scheduler, self._extra(trainer), metric=metric)
        self._saved, self._since = trainer.step, time.monotonic()
        trainer.tell("on_save", path.name, time.perf_counter() - begin)

    def _extra(self, trainer: Trainer) -> dict[str, Any]:
        return {
            "step": trainer.step,
            "skipped": trainer.skipped,
            "position": trainer.position,
            "scaler": None if trainer.scaler is None else trainer.scaler.state_dict(),
            "best": self._early.best if math.isfinite(self._early.best) else None,
            "since": self._early.since,
        }

    def go_on(self, trainer: Trainer, feed: Feed, path: Path | None = None) -> None:
        """From the newest checkpoint of the run, or from that one."""
        if path is None and self._store.latest is None:
            return
        load: Callable[..., Any] = self._store.load
        if path is not None:
            load = lambda *state: trainer.pipe.load(path, *state)  # noqa: E731
        extra = load(trainer.optimizer, trainer.scheduler)
        if not isinstance(extra, dict) or not {"step", "position", "skipped"} <= set(extra):
            raise CheckpointError(
                f"{path or self._store.latest} was not saved by `gapless train`: load it with pipe.load in a program"
            )
        trainer.step = self._saved = extra["step"]
        trainer.skipped, trainer.position = extra["skipped"], extra["position"]
        feed.seek(extra["position"])
        if trainer.scaler is not None and extra.get("scaler"):
            trainer.scaler.load_state_dict(extra["scaler"])
        self._early.best = math.inf if extra.get("best") is None else extra["best"]
        self._early.since = extra.get("since", 0)
        if path is not None:
            self._saved = None  # it is not in this run's folder yet
