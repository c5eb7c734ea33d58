"""What a loss takes its mean over, and so how much each microbatch counts.

The mean of a minibatch is the sum of its microbatches' means, each times its share of what the mean is over. That is
the samples, unless the loss leaves targets out (those that are -100, as a rule): then it is the targets that are left.
Of torch's own losses it is known which these are, and one that is not in the lists here is asked about. Of any other
function the graph tells (`loss_divisors`), or its targets; where that is not enough it is refused, since a mean of
means would train on with wrong numbers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gapless.errors import ConfigError, GaplessError
from gapless.guards.batches_and_losses import CUT_BATCHES, LOSS_COUNTS
from gapless.stage.split.interception import has_hooks, is_plainly_called

from . import microbatch as mb
from .minibatch import Minibatch

IGNORED = -100


def check_scalar(loss: Any) -> None:
    """Of anything else there is no gradient."""
    if not isinstance(loss, Tensor):
        raise GaplessError(f"the loss must return a scalar tensor, but it returned a {type(loss).__name__}.")
    if loss.dim() != 0:
        raise GaplessError(
            f"the loss must be a scalar, but it has the shape {tuple(loss.shape)}: reduce it, with mean() for example."
        )


def _code_of(names: str) -> frozenset[Any]:
    """What runs when these are called: functions, and the forwards of classes; some came with later versions."""
    found: list[Any] = [getattr(F, name, None) or getattr(nn, name, None) for name in names.split()]
    return frozenset(getattr(each, "forward", each) for each in found if each is not None)


# Means over the targets that count, each with the weight of its class.
_OVER_TARGETS = _code_of(
    "cross_entropy nll_loss linear_cross_entropy CrossEntropyLoss NLLLoss NLLLoss2d LinearCrossEntropyLoss"
)
# Means over samples, or over their elements; the first ones multiply by weights that may have a row for each sample.
_WITH_ROWS = _code_of(
    "binary_cross_entropy binary_cross_entropy_with_logits multilabel_soft_margin_loss BCELoss BCEWithLogitsLoss "
    "MultiLabelSoftMarginLoss"
)
_OVER_SAMPLES = _WITH_ROWS | _code_of(
    "cosine_embedding_loss ctc_loss gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss "
    "margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss poisson_nll_loss smooth_l1_loss "
    "soft_margin_loss triplet_margin_loss triplet_margin_with_distance_loss CosineEmbeddingLoss CTCLoss "
    "GaussianNLLLoss HingeEmbeddingLoss HuberLoss KLDivLoss L1Loss MarginRankingLoss MSELoss MultiMarginLoss "
    "MultiLabelMarginLoss PoissonNLLLoss SmoothL1Loss SoftMarginLoss TripletMarginLoss TripletMarginWithDistanceLoss"
)


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
            raise LOSS_COUNTS.refusal(
                f"targets of {IGNORED} are spread unevenly over the microbatches, and gapless can't tell whether the "
                "loss averages over the other targets only",
                f"{LOSS_COUNTS.way_out}, as lambda target: (target != {IGNORED}).sum(); without a target it gets the "
                "microbatch's inputs",
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
    code, reduction = known["code"], known.get("reduction", "mean")
    if reduction == "sum":
        return Weighed([1.0] * len(counts), summed=True)
    if code not in _OVER_SAMPLES | _OVER_TARGETS:
        raise LOSS_COUNTS.refusal(
            f"gapless does not know what the mean of {_name_of(code)} is over",
            f"{LOSS_COUNTS.way_out}, such as len for samples",
        )
    if code in _OVER_TARGETS and reduction == "mean" and _are_classes(came):
        ignored, weight = known.get("ignore_index"), known.get("weight")
        ignored = IGNORED if ignored is None else ignored
        if weight is not None or any(bool((each == ignored).any()) for each in came):
            return Weighed(torch.stack([number_of(target, ignored, weight) for target in targets]).tolist())
    if code in _WITH_ROWS:
        _refuse_rows([known.get("weight"), known.get("pos_weight")], came)
    return Weighed([float(count) for count in counts])


def _refuse_rows(weights: Sequence[Any], targets: Sequence[Any]) -> None:
    """Weights of all samples fit a microbatch of one sample too, which would get them all."""
    for weight in weights:
        for target in targets:
            if not isinstance(weight, Tensor) or not isinstance(target, Tensor) or weight.dim() < target.dim():
                continue
            if target.dim() and weight.size(weight.dim() - target.dim()) > 1:
                raise CUT_BATCHES.refusal(
                    f"the loss has a weight of shape {tuple(weight.shape)} for a target of shape "
                    f"{tuple(target.shape)}, which is a row for each sample, and it would go whole to every microbatch",
                    "give the weights with the target, and a loss that takes them from there",
                )


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


def is_known(loss: Any) -> bool:
    """Whether it is torch's own, so that `weighed` knows what it counts, or asks."""
    return _options(loss) is not None


def _options(loss: Any) -> dict[str, Any] | None:
    """Of a loss that is torch's own, what runs (`code`), how it reduces, and what it leaves out. None for any other."""
    loss = getattr(loss, "_orig_mod", loss)  # compiled, it counts the same
    if isinstance(loss, functools.partial) and not loss.args:
        inner = _options(loss.func)
        return None if inner is None or {"size_average", "reduce"} & loss.keywords.keys() else inner | loss.keywords
    if not isinstance(loss, nn.Module):
        own = getattr(F, getattr(loss, "__name__", ""), None) is loss
        return {"code": loss} if own else None
    code = type(loss).forward
    if has_hooks(loss) or not is_plainly_called(loss) or getattr(code, "__module__", "") != "torch.nn.modules.loss":
        return None
    return {"code": code} | {
        name: getattr(loss, name, None) for name in ("reduction", "ignore_index", "weight", "pos_weight")
    }


def _name_of(code: Any) -> str:
    return str(getattr(code, "__qualname__", code)).removesuffix(".forward")


Weigh = Callable[[Minibatch], Weighed]
