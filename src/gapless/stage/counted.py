"""What a loss takes its mean over, and so how much each microbatch counts.

The mean of a minibatch is the sum of its microbatches' means, each times its share of what the mean is over. That is
the samples, unless the loss leaves targets out (those that are -100, as a rule): then it is the targets that are left.
Torch's own losses tell which these are. Of any other function nothing is known; where it matters it is refused, since a
mean of means would train on with wrong numbers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gapless.errors import ConfigError

from . import microbatch as mb
from .minibatch import Minibatch

IGNORED = -100
_LEAVING_OUT = (F.cross_entropy, F.nll_loss, nn.CrossEntropyLoss, nn.NLLLoss)


@dataclasses.dataclass(frozen=True)
class Weighed:
    """What each microbatch counts. `summed`: losses are sums, which need no share. `kept` is the share of targets that
    are not -100, where the loss is not known: it must be the same everywhere, and is no number where it is not.
    """

    numbers: Sequence[float]
    summed: bool = False
    kept: float = 1.0

    def check_kept(self, others: Sequence[float] = ()) -> None:
        """Raises if it matters what the loss takes its mean over; `others` are the shares of other replicas."""
        if any(not share == self.kept for share in (self.kept, *others)):
            raise ConfigError(
                f"targets of {IGNORED} are spread unevenly over the microbatches, and gapless can't tell whether the "
                "loss averages over the other targets only: pass loss_weight=, a function that counts what the mean is "
                f"over, as lambda target: (target != {IGNORED}).sum(); without a target it gets the microbatch's inputs"
            )


def weighed(loss: Any, loss_weight: mb.LossWeight, batch: Minibatch) -> Weighed:
    """What microbatches count: by their targets or, where there are none, by their inputs."""
    counts = batch.sizes
    targets, came = batch.parts if batch.target is None else batch.targets, batch.counted
    if loss_weight is not None:
        return told(loss_weight, targets)
    known = _options(loss)
    if known is None:
        return unknown(counts, targets, came)
    if known.get("reduction", "mean") == "sum":
        return Weighed([1.0] * len(counts), summed=True)
    if known.get("reduction", "mean") == "mean" and "ignore_index" in known and _are_classes(came):
        ignored, weight = known["ignore_index"], known["weight"]
        if weight is not None or any(bool((each == ignored).any()) for each in came):
            return Weighed(torch.stack([number_of(target, ignored, weight) for target in targets]).tolist())
    return Weighed([float(count) for count in counts])


def _are_classes(targets: Sequence[Any]) -> bool:
    return all(isinstance(each, Tensor) and not each.is_floating_point() for each in targets)


def told(loss_weight: Callable[[Any], Any] | Literal["sum"], targets: Sequence[Any]) -> Weighed:
    """As the user says: losses are sums, or a function counts."""
    if loss_weight == "sum":
        return Weighed([1.0] * len(targets), summed=True)
    return Weighed([_number(loss_weight(target), microbatch) for microbatch, target in enumerate(targets)])


def _number(count: Any, microbatch: int) -> float:
    try:
        number = float(count)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(
            f"loss_weight gave {count!r:.60} for microbatch {microbatch}, but it must count what the loss is a mean "
            "over: a number of at least 0"
        )
    return number


def unknown(counts: Sequence[int], targets: Sequence[Any], came: Sequence[Any]) -> Weighed:
    """By samples, if it does not matter."""
    samples = [float(count) for count in counts]
    if not any(bool((leaf == IGNORED).any()) for leaf in _integers(list(came))):
        return Weighed(samples)
    kept = {_kept(target) for target in targets}
    return Weighed(samples, kept=kept.pop() if len(kept) == 1 else math.nan)


def _kept(target: Any) -> float:
    leaves = _integers(target)
    return sum(int((leaf != IGNORED).sum()) for leaf in leaves) / max(1, sum(leaf.numel() for leaf in leaves))


def _integers(tree: Any) -> list[Tensor]:
    return [
        leaf
        for leaf in mb.flatten(tree)[0]
        if leaf.dim() and not leaf.is_floating_point() and not leaf.is_complex() and leaf.dtype != torch.bool
    ]


def number_of(target: Tensor, ignored: int, weight: Tensor | None = None) -> Tensor:
    """What torch's cross entropy divides by: the targets that count, each with the weight of its class."""
    if target.is_floating_point():  # probabilities of classes: every row counts
        return torch.tensor(target.numel() // max(1, target.size(1 if target.dim() > 1 else 0)))
    kept = target != ignored
    return kept.sum() if weight is None else weight.to(target.device)[target[kept]].sum()


def _options(loss: Any) -> dict[str, Any] | None:
    """Of a loss that is torch's own: how it reduces, and what it leaves out. None for any other."""
    loss = getattr(loss, "_orig_mod", loss)  # compiled, it counts the same
    if isinstance(loss, functools.partial) and not loss.args:
        inner = _options(loss.func)
        return None if inner is None or {"size_average", "reduce"} & loss.keywords.keys() else inner | loss.keywords
    if loss in _LEAVING_OUT:
        return {"ignore_index": IGNORED, "weight": None}
    if _is_torchs(loss) and isinstance(loss, nn.Module):
        names = ("reduction", "ignore_index", "weight") if type(loss) in _LEAVING_OUT else ("reduction",)
        return {name: getattr(loss, name) for name in names if hasattr(loss, name)}
    return {} if _is_torchs(loss) else None


def _is_torchs(loss: Any) -> bool:
    """A function of torch.nn.functional, or a module of torch.nn.modules.loss, and not a class made from one."""
    if isinstance(loss, nn.Module):
        hooked = loss._forward_hooks or loss._forward_pre_hooks
        return type(loss).__module__ == "torch.nn.modules.loss" and not hooked
    return getattr(F, getattr(loss, "__name__", ""), None) is loss


Weigh = Callable[[Minibatch], Weighed]
