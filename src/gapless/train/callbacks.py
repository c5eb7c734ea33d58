"""What may be done around the steps of a run: a callback has a method for each moment, all of which do nothing unless
overridden.

    class Sampler(Callback):
        def on_evaluate(self, trainer, loss, seconds):
            print(trainer.step, loss)
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gapless.pipeline.pipeline import Pipeline
from gapless.schedule.timeline import Timeline


class Loop(Protocol):
    """What a callback sees of the trainer."""

    pipe: Pipeline
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    scaler: torch.amp.GradScaler | None
    steps: int  # to be done
    step: int  # the last that was
    skipped: int  # updates left out in a row
    ended: str  # why training ended, when it has
    position: Any  # in the data

    def stop(self, why: str) -> None:
        """No further step after this one."""

    def tell(self, moment: str, *facts: Any) -> None:
        """All callbacks, in their order."""


@dataclass(frozen=True)
class Step:
    """What an update left.

    number   counts from 1
    loss     the mean over its minibatches
    rate     the learning rate of the first group of parameters
    norm     of all gradients before clipping; None with a scaler that looks at them, where nothing is clipped
    samples  trained on, by all replicas where the data tells, and `tokens` where the inputs are token numbers
    seconds  the whole update, of which it `waited` for data, and `updated` the weights
    skipped  why the weights were not changed, if they were not
    """

    number: int
    loss: float
    rate: float
    norm: float | None
    samples: int
    tokens: int | None
    seconds: float
    waited: float
    updated: float
    skipped: str = ""
    timeline: Timeline | None = None


class Callback:
    """Told of everything that happens. On ranks each has callbacks of its own, and all are told of the same."""

    def on_start(self, trainer: Loop) -> None:
        """Before the first step."""

    def on_begin(self, trainer: Loop) -> None:
        """Before each step: the time to ask for its timeline with `trainer.pipe.timeline = True`."""

    def on_step(self, trainer: Loop, step: Step) -> None:
        """After each step."""

    def on_evaluate(self, trainer: Loop, loss: float, seconds: float) -> None:
        """After each evaluation, which took so long."""

    def on_save(self, trainer: Loop, path: str, seconds: float) -> None:
        """After each checkpoint; with `background` it is still being written."""

    def on_end(self, trainer: Loop) -> None:
        """After the last step; `trainer.ended` says why it was the last. Also where an exception ended it."""
