"""The training loop, as `gapless train` runs it. It may be used, or copied and changed: it is all here.

    trainer = Trainer(pipe, optimizer, batches, steps=1000, clip=1.0, callbacks=[Lines(print)])
    trainer.run()

What may be done around its steps: a callback has a method for each moment, all of which do nothing unless overridden.

    class Sampler(Callback):
        def on_evaluate(self, trainer, loss, seconds):
            print(trainer.step, loss)
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from gapless.errors import GaplessError
from gapless.guards.weights_and_gradients import NOT_FINITE
from gapless.pipeline.overlapped_training import OverlappedTraining
from gapless.pipeline.pipeline import Pipeline
from gapless.pipeline.result import PendingResult, Result
from gapless.schedule.timeline import Timeline
from gapless.train.config import user_code as own
from gapless.train.data.feed import Batch, with_shape
from gapless.train.run.batch_counts import counts_of, size_of

SIGTERM = "SIGTERM"  # why ranks end that were asked to leave
_SCALES = 32  # steps in which a scaler may look for its scale: it halves it each time


@dataclass(frozen=True)
class Step:
    """What an update left.

    number   counts from 1
    loss     the mean over its minibatches
    rate     the learning rate of the first group of parameters
    norm     of all gradients before clipping; None with a scaler that looks at them, where nothing is clipped
    samples  trained on, by all replicas where the data tells, and `tokens` where the inputs are token numbers
    seconds  the whole update, of which it `waited` for data, and `updated` the weights; where steps overlap, from the
             one before to this one, and data that is fetched while a step is under way is not waited for
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


@dataclass(frozen=True)
class Handed:
    """An update whose steps were handed over: with `Trainer.training` they may be under way."""

    number: int
    results: Sequence[Result | PendingResult]
    counts: tuple[int, int | None]
    begin: float
    waited: float


class Callback:
    """Receives every event. Each rank has its own callbacks, and all receive the same events."""

    def on_start(self, trainer: "Trainer") -> None:
        """Before the first step."""

    def on_begin(self, trainer: "Trainer") -> None:
        """Before each step: the time to ask for its timeline with `trainer.pipe.timeline = True`."""

    def on_step(self, trainer: "Trainer", step: Step) -> None:
        """After each step; with `Trainer.training` the next one may have started, and `trainer.step` counts it."""

    def on_evaluate(self, trainer: "Trainer", loss: float, seconds: float) -> None:
        """After each evaluation, with its duration."""

    def on_save(self, trainer: "Trainer", path: str, seconds: float) -> None:
        """After each checkpoint; with `background` it is still being written."""

    def on_end(self, trainer: "Trainer") -> None:
        """After the last step, also after an exception; `trainer.ended` is the reason."""


class NotFiniteError(GaplessError):
    """The loss is no number any more."""


class Trainer:
    """Trains a pipeline for a number of updates.

    batches     an iterable of (inputs, target); training ends when it does. Its `position`, if it has one, is passed to
                callbacks, and its `samples` are those of the last batch on all replicas
    clip        the norm that gradients are clipped to
    accumulate  minibatches in one update
    scaler      a torch.amp.GradScaler, for float16
    autocast    makes the context in which steps run, such as torch.autocast
    evaluate    returns a loss, or None; called after `every` updates, and after the last
    skip        how many updates in a row may be skipped because the loss is not finite
    training    `pipe.training` with this optimizer, clip and scheduler: an optimizer step that does not wait
    """

    def __init__(
        self,
        pipe: Pipeline,
        optimizer: torch.optim.Optimizer,
        batches: Iterable[Batch],
        *,
        steps: int,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        clip: float | None = None,
        accumulate: int = 1,
        scaler: torch.amp.GradScaler | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        evaluate: Callable[[], float | None] | None = None,
        every: int = 1,
        skip: int = 0,
        training: OverlappedTraining | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.pipe, self.optimizer, self.batches, self.steps, self.scheduler = pipe, optimizer, batches, steps, scheduler
        self.clip, self.accumulate, self.scaler, self.autocast = clip, accumulate, scaler, autocast
        self.evaluate, self.every, self.skip, self.callbacks = evaluate, every, skip, list(callbacks)
        self.training = training
        self._under_way: Handed | None = None
        self._reported = 0.0  # when a step was, last
        self.step = 0  # updates done, also those that were left out
        self.skipped = 0  # those in a row
        self.ended = ""  # why training ended, when it has; an exception leaves this empty
        self._why = ""  # it is to end
        self.position = getattr(batches, "position", None)  # in the data, of what comes after those

    def stop(self, why: str) -> None:
        """No further step after this one."""
        self._why = self._why or why

    def tell(self, moment: str, *facts: Any) -> None:
        """All callbacks, in their order."""
        for callback in self.callbacks:
            getattr(callback, moment)(self, *facts)

    def run(self) -> None:
        """Train to the last step, or until something stops it."""
        source = iter(self.batches)
        try:
            self.tell("on_start")
            while self._goes_on():
                self.tell("on_begin")
                begin = time.perf_counter()
                batches, sizes = list[Batch](), list[int]()
                for _, batch in zip(range(self.accumulate), source, strict=False):
                    batches.append(batch)
                    sizes.append(size_of(self.batches, batch))
                if len(batches) < self.accumulate:
                    self.stop("the data has ended")
                    break
                handed = self._hand_over(batches, sizes, begin)
                if handed is None:
                    continue
                self.settle()  # the one before, which has ended meanwhile
                self._under_way, self.step = handed, handed.number
                self.position = getattr(self.batches, "position", None)
                last = handed.results[-1]
                if not isinstance(last, PendingResult) or last.is_settled:
                    self.settle()
                if self.evaluate is not None and (self.step % self.every == 0 or self.step == self.steps):
                    self.settle()
                    self._evaluate(self.evaluate)
            self.settle()
            self.ended = self._why or "all steps are done"
        finally:
            _end(self)

    def _goes_on(self) -> bool:
        if self.pipe.stopping:  # the same on all ranks, none of which may begin another step
            self.stop(SIGTERM)
        return not self._why and self.step < self.steps

    def _evaluate(self, evaluate: Callable[[], float | None]) -> None:
        begin = time.perf_counter()
        if not self.pipe.stopping and (loss := evaluate()) is not None:
            self.tell("on_evaluate", loss, time.perf_counter() - begin)

    def settle(self) -> None:
        """Waits until all steps have ended and were reported."""
        handed, self._under_way = self._under_way, None
        if handed is not None:
            try:
                with own.told(f"step {handed.number}"):
                    done = self._updated(handed)
            except BaseException:
                self.step = handed.number - 1
                raise
            self.tell("on_step", done)

    def _hand_over(self, batches: Sequence[Batch], sizes: Sequence[int], begin: float) -> Handed | None:
        """One update, on all of these; None if the ranks were asked to leave before it."""
        come, number, results = time.perf_counter(), self.step + 1, list[Result | PendingResult]()
        shares = self._shares(batches)
        if self.pipe.stopping:
            return None
        where = f"step {number}" if self._under_way is None else f"step {number - 1} or {number}"
        for batch, share in zip(batches, shares, strict=True):
            with own.told(f"{where}{with_shape(batch)}"), self.autocast():
                last = len(results) + 1 == len(batches)
                if self.training is not None:
                    results.append(self.training.step(*batch, weight=share, sync=last))
                else:
                    results.append(self.pipe.step(*batch, weight=share, sync=last, scaler=self.scaler))
        return Handed(number, results, counts_of(batches, sizes), begin, 0.0 if self._under_way else come - begin)

    def _updated(self, handed: Handed) -> Step:
        number, results, last = handed.number, handed.results, handed.results[-1]
        loss = sum(float(result.loss) for result in results if result.loss is not None)
        ran, rate = time.perf_counter(), float(self.optimizer.param_groups[0]["lr"])
        norm, wrong = None, "" if math.isfinite(loss) else _not_finite(results, number)
        if isinstance(last, PendingResult):
            rate, norm = float(last.rate), None if wrong or last.norm is None else float(last.norm)
            wrong = wrong or (f"the gradients of step {number} have norm {norm}" if last.skipped else "")
        elif wrong:
            self.pipe.zero_grad()
        else:
            with own.told(f"the update of step {number} with {type(self.optimizer).__name__}"):
                norm, wrong = _change_weights(self, number)
        self.skipped = self.skipped + 1 if wrong else 0
        if self.skipped > self.skip + (_SCALES if self.scaler is not None and math.isfinite(loss) else 0):
            raise NOT_FINITE.refusal(wrong, kind=NotFiniteError)
        if self.training is None and self.scheduler is not None and not wrong:
            self.scheduler.step()
        now = time.perf_counter()
        times = now - max(handed.begin, self._reported), handed.waited, now - ran
        self._reported = now
        return Step(number, loss, rate, norm, *handed.counts, *times, wrong, last.timeline)

    def _shares(self, batches: Sequence[Batch]) -> list[float | Fraction]:
        """What each minibatch counts in the update."""
        if len(batches) == 1:
            return [1.0]
        with own.told(f"step {self.step + 1}{with_shape(batches[0])}"):
            return self.pipe.shares(batches)


def _change_weights(trainer: Trainer, number: int) -> tuple[float | None, str]:
    """The norm of the gradients, and why the weights stay as they were, if they do."""
    norm, scaler = None, trainer.scaler
    if scaler is not None:
        scaler.unscale_(trainer.optimizer)
    if trainer.clip is not None or scaler is None:  # a scaler looks for itself whether they are finite
        norm = float(trainer.pipe.clip_grad_norm_(math.inf if trainer.clip is None else trainer.clip))
    wrong = "" if norm is None or math.isfinite(norm) else f"the gradients of step {number} have norm {norm}"
    if scaler is not None:
        before = scaler.get_scale()
        scaler.step(trainer.optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            wrong = f"the gradients of step {number} overflow float16, at a scale of {before:g}"
    elif not wrong:
        trainer.optimizer.step()
    trainer.pipe.zero_grad()
    return norm, wrong


def _end(trainer: Trainer) -> None:
    """All callbacks hear of it, whatever one of them raises; the first error is told."""
    wrong = list[BaseException]()
    for callback in trainer.callbacks:
        try:
            callback.on_end(trainer)
        except BaseException as error:
            wrong.append(error)
    if wrong:
        raise wrong[0]


def _not_finite(results: Sequence[Result | PendingResult], number: int) -> str:
    """Which loss: that of the first microbatch, over all minibatches of the update, whose loss is no number."""
    losses = [float(loss) for result in results for loss in result.losses]
    wrong = next((each for each, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if wrong is None:
        return f"the losses of step {number} do not add up to a finite number"
    return f"the loss of step {number} is {losses[wrong]}, in microbatch {wrong} of {len(losses)}"
