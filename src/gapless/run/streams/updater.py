"""What one stage does at an update: its gradients are checked and clipped, and its own optimizer is stepped."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gapless.errors import GaplessError
from gapless.guards.weights_and_gradients import NOT_FINITE
from gapless.run.streams.correction import lr_by_delay, predictions, scaled_lr


@dataclass
class Updater:
    """Of the stage with that number, whose gradients are `delay` updates old. `optimizer` is None if nothing is trained
    there. `ahead`: forwards use weights that are predicted; `annealed_over`: updates in which the learning rate rises
    to what the user has set.
    """

    stage: int
    delay: int
    optimizer: Optimizer | None
    scheduler: Any = None
    clip: float | None = None
    ahead: bool = False
    annealed_over: int | None = None
    minibatch: int = 0
    _norm: Tensor = field(default_factory=lambda: torch.zeros(()))

    def check(self, minibatch: int, grads: Mapping[nn.Parameter, Tensor | None]) -> None:
        """What comes next is the update with this one, and these gradients. Raises before anything has changed."""
        self.minibatch = minibatch
        if self.optimizer is None:
            return
        found = [grads[each] for group in self.optimizer.param_groups for each in group["params"]]
        own = [each for each in found if each is not None]
        if any(grad.is_sparse for grad in own):
            raise GaplessError(
                f"a gradient at stage {self.stage} is sparse, which a stream can't take: use sparse=False"
            )
        if self.clip is not None:
            self._norm = nn.utils.get_total_norm(own)
        if not (_are_finite(own) if self.clip is None else math.isfinite(self._norm.item())):
            raise NOT_FINITE.refusal(
                f"a gradient of minibatch {self.minibatch} at stage {self.stage} is not finite, and its update was not "
                "made"
            )

    def step(self) -> None:
        """The parameters have their gradients, which were checked. The norm that is clipped is the stage's own: without
        a flush there is no moment at which all stages have theirs.
        """
        if self.optimizer is None:
            return
        if self.clip is not None:
            parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
            nn.utils.clip_grads_with_norm_(parameters, self.clip, self._norm)
        with self._lr(self.minibatch):
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def predict(self) -> Mapping[Tensor, Tensor]:
        """The weights as they are expected to be when the gradient of the minibatch that uses them is applied, with the
        learning rate of the next update.
        """
        if self.optimizer is None or not self.ahead:
            return {}
        with self._lr(self.minibatch + 1):
            return predictions(self.optimizer, self.delay)

    def predict_anew(self, update: int) -> list[Mapping[Tensor, Tensor]]:
        """The same where there are no older weights: the next minibatch is applied to what it has used, the one after
        it an update later, and so on up to the usual delay. Nothing if the optimizer has no direction yet.
        """
        if self.optimizer is None or not self.ahead:
            return []
        with self._lr(update):
            found: list[Mapping[Tensor, Tensor]] = [predictions(self.optimizer, s) for s in range(self.delay + 1)]
        return found if found[-1] else []

    def _lr(self, update: int) -> AbstractContextManager[None]:
        if self.optimizer is None or self.annealed_over is None:
            return nullcontext()
        return scaled_lr(self.optimizer, lr_by_delay(self.delay, update, self.annealed_over))


def _are_finite(grads: Sequence[Tensor]) -> bool:
    """Asks the device once; the norm of all costs more than the step of a small stage."""
    if not grads:
        return True
    norms = torch._foreach_norm(list(grads))
    return math.isfinite((norms[0] if len(norms) == 1 else torch.stack(norms).double().sum()).item())
