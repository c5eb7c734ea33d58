"""The loss on data that is not trained on: the same batches every time. And an end when it gets no better."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from fractions import Fraction
from typing import Any

from gapless.pipeline.pipeline import Pipeline
from gapless.train.config import user_code as own
from gapless.train.data.feed import Feed, with_shape
from gapless.train.run.trainer import Callback, Trainer
from gapless.train.torchrun import Ranks


def evaluated(
    pipe: Pipeline, feed: Feed, batches: int, autocast: Callable[[], AbstractContextManager[Any]], ranks: Ranks
) -> float | None:
    """The mean loss of the first batches of a feed, each as much as it counts. None where the ranks were asked to leave
    in the middle of it.
    """
    losses, counts = list[float](), list[float]()
    feed.seek({"pass": 0, "batch": 0})
    for _, batch in zip(range(batches), feed, strict=False):
        if feed.position["pass"] > 0:
            break  # the data has fewer batches than were asked for
        if pipe.stopping:
            return None
        with own.told(f"evaluating{with_shape(batch)}"), autocast():
            result = pipe.evaluate(*batch, outputs=False)
        assert result.loss is not None
        losses.append(float(result.loss))
        counts.append(1.0 if result.counted is None else result.counted)
    rows = ranks.gathered(counts) if ranks.replicas > 1 else [counts]
    return mean_loss(losses, [sum(map(Fraction, each), Fraction(0)) for each in zip(*rows, strict=True)])


def mean_loss(losses: Sequence[float], counts: Sequence[Fraction]) -> float:
    """Each loss is that of all replicas, and so is what it counts: all ranks get the same bits."""
    whole = sum(counts)
    if not whole:
        return math.nan
    return sum(float(count / whole) * loss for count, loss in zip(counts, losses, strict=True) if count)


class EarlyStop(Callback):
    """Ends training after so many evaluations without a better one."""

    def __init__(self, patience: int | None) -> None:
        self._patience = patience
        self.best, self.since = math.inf, 0

    def on_evaluate(self, trainer: Trainer, loss: float, seconds: float) -> None:
        self.best, self.since = (loss, 0) if loss < self.best else (self.best, self.since + 1)
        if self._patience is not None and self.since >= self._patience:
            trainer.stop(f"no better evaluation than {self.best:.4g} in {self.since}")
