"""What one stage does at an update: its gradients are checked and clipped, and its own optimizer is stepped."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gapless.errors import GaplessError
from gapless.run.flow.correction import lr_by_delay, predictions, scaled_lr


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

    def now(self, minibatch: int) -> None:
        """What comes next is the update with this one."""
        self.minibatch = minibatch

    def step(self) -> None:
        """The parameters have their gradients. The norm that is clipped is the stage's own: without a flush there is
        no moment at which all stages have theirs.
        """
        if self.optimizer is None:
            return
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        grads = [each.grad for each in parameters if each.grad is not None]
        if any(grad.is_sparse for grad in grads):
            raise GaplessError(
                f"a gradient at stage {self.stage} is sparse, which a stream can't take: use sparse=False"
            )
        norm = nn.utils.get_total_norm(grads)
        if not math.isfinite(norm.item()):
            raise GaplessError(
                f"a gradient of minibatch {self.minibatch} at stage {self.stage} is not finite, and its update was not "
                "made: lower the learning rate, or clip with clip="
            )
        if self.clip is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        with self._lr():
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def predict(self) -> Mapping[Tensor, Tensor]:
        """The weights as they are expected to be when the gradient of the minibatch that uses them is applied."""
        if self.optimizer is None or not self.ahead:
            return {}
        with self._lr():
            return predictions(self.optimizer, self.delay)

    def _lr(self) -> AbstractContextManager[None]:
        if self.optimizer is None or self.annealed_over is None:
            return nullcontext()
        return scaled_lr(self.optimizer, lr_by_delay(self.delay, self.minibatch, self.annealed_over))
