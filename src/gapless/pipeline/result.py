"""What a step leaves."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from gapless.errors import GaplessError, TransportError
from gapless.run.channels import StoppedError
from gapless.run.overlap.verdict import Verdict
from gapless.schedule.timeline import Timeline
from gapless.stage.batch.plain import sum_in_order


@dataclass(frozen=True)
class Result:
    """What a step returns. All tensors are detached.

    loss      of the minibatch: the losses times their weights, added in order; None without a target. If a minibatch
              is spread over several steps, their losses add up to the minibatch's
    losses    of the microbatches, in order and not weighted
    weights   of the microbatches: their shares of the minibatch
    counted   what the loss is a mean over: samples, or the targets that count; with replicas, this one's. None for a
              loss that is a sum
    outputs   of the minibatch, concatenated; None unless requested, and under a mesh on ranks without the last stage.
              Values without a row per sample that differ between microbatches are a list; the loss of a model that
              returns its own is `loss`
    timeline  as measured; None unless requested
    """

    losses: tuple[Tensor, ...]
    weights: tuple[float, ...]
    outputs: Any = None
    timeline: Timeline | None = None
    counted: float | None = None

    def __repr__(self) -> str:
        """What people look for first; the outputs may be large."""
        shown = [f"loss={'None' if self.loss is None else f'{self.loss.item():.6g}'}"]
        shown += [f"microbatches={len(self.losses)}"] if self.losses else []
        shown += [] if self.counted is None else [f"counted={self.counted:g}"]
        shown += [f"{name}=..." for name in ("outputs", "timeline") if getattr(self, name) is not None]
        return f"Result({', '.join(shown)})"

    @cached_property
    def loss(self) -> Tensor | None:
        if not self.losses:
            return None
        loss: Any = sum_in_order(self.losses, self.weights)
        loss.backward = _told  # not part of what is saved or copied of it
        loss.__getstate__ = dict
        return loss  # type: ignore[no-any-return]


def _told(*_: Any, **__: Any) -> None:
    raise GaplessError(
        "there is nothing to go back through: step has computed the gradients already, and evaluate computes none; "
        "leave out loss.backward()"
    )


class PendingResult:
    """A `Result` of a step that may not have ended: reading its `loss` waits until it is computed. Reading `norm` (of
    all gradients before clipping), `skipped` (whether they or the loss were not finite) or `timeline` settles the step.
    `rate` is the learning rate of its update, that of the optimizer's first group.
    """

    def __init__(self, compute: Callable[[], Result], settle: Callable[[], None], rate: Any) -> None:
        self._compute, self._settle, self.rate = compute, settle, rate
        self._verdict: Verdict | None = None
        self._timeline: Timeline | None = None

    @cached_property
    def result(self) -> Result:
        """All of it."""
        try:
            return self._compute()
        except StoppedError:
            self._settle()  # which raises why, unless that was done before
            raise TransportError("the step was abandoned and has no loss: an earlier error says why") from None

    @property
    def loss(self) -> Tensor | None:
        return self.result.loss

    @property
    def norm(self) -> Tensor | None:
        return self._judged().total

    @property
    def skipped(self) -> bool:
        return self._judged().skips

    @property
    def timeline(self) -> Timeline | None:
        self._judged()
        return self._timeline or self.result.timeline

    @property
    def is_settled(self) -> bool:
        return self._verdict is not None

    def judge(self, verdict: Verdict | None, timeline: Timeline | None) -> None:
        """Settles the step before its tensors are freed."""
        self.result  # noqa: B018
        self._verdict, self._timeline, self._compute = verdict or Verdict(), timeline, _gone

    def _judged(self) -> Verdict:
        if self._verdict is None:
            self._settle()
        return self._verdict or Verdict()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.result, name)

    def __repr__(self) -> str:
        return repr(self.result) if "result" in self.__dict__ else "Result(under way)"


def _gone() -> Result:
    raise AssertionError("computed before")
