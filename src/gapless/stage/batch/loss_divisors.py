"""What a loss of the user's own divides by, read from its graph.

A function that calls torch's cross entropy is a mean over the targets that count, or over the weights of their classes,
and only its graph knows which these are. Microbatches count by their samples then, which is right if all of them leave
out as much; that is looked at in every step, for the nodes are there anyway.

    loss <- cross entropy (target, weight, ignore_index) <- view <- outputs      the walk ends at the outputs
"""

from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapless.guards.batches_and_losses import LOSS_DIVISORS

from . import microbatch as mb

_CROSS_ENTROPIES = ("NllLossBackward0", "NllLoss2DBackward0")
_UNREADABLE = "linear_cross_entropy"
_MEAN = 1
_GRAD_FN, _NODE = attrgetter("grad_fn"), itemgetter(0)  # of a tensor; of an edge


class _Microbatch(NamedTuple):
    step: int
    divisors: list[Tensor]
    weight: float | Tensor  # what its loss is multiplied by
    ready: Any = None  # when these are, of a GPU


class Divisors:
    """Of the microbatches of a step, which are compared with its first. What a GPU computes is looked at one step
    later, but for the first step: nothing waits for it.
    """

    def __init__(self) -> None:
        self._first: tuple[int, list[float], float] | None = None
        self._later: list[_Microbatch] = []
        self._looked = False

    def note(self, step: int, weight: float | Tensor, outputs: Any, loss: Any) -> None:
        """The loss of a microbatch is there, with its graph. `weight`: what it is multiplied by."""
        node = getattr(loss, "grad_fn", None)
        if node is None or (loss.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        tensors = [outputs] if type(outputs) is Tensor else mb.flatten(outputs)[0]
        found = [*map(_divisor, _cross_entropies(node, set(map(_GRAD_FN, tensors))))]
        if not loss.is_cuda:
            self._check(_Microbatch(step, found, weight))
        elif found:
            told = _to_host(weight) if isinstance(weight, Tensor) else weight
            hosts = [_to_host(each) for each in found]
            self._later.append(_Microbatch(step, hosts, told, torch.cuda.current_stream(loss.device).record_event()))

    def finish(self) -> None:
        """A step is over."""
        due = [each for each in self._later if not self._looked or each.step < self._later[-1].step]
        self._later, self._looked = self._later[len(due) :], True
        for each in due:
            each.ready.synchronize()
            self._check(each)
        self._first = None

    def drop(self) -> None:
        """A step has failed."""
        self._first, self._later = None, []

    def _check(self, microbatch: _Microbatch) -> None:
        """Raises if it divides by something else than what it counts."""
        divisors, weight = [*map(float, microbatch.divisors)], float(microbatch.weight)
        if self._first is None or self._first[0] != microbatch.step:
            self._first = microbatch.step, divisors, weight
            return
        _, others, other = self._first
        if divisors == others and weight == other:
            return
        low = (torch.finfo(each.dtype).eps for each in microbatch.divisors if each.is_floating_point())
        most = 1e-6 + 16 * max(low, default=0.0)
        if len(divisors) == len(others) and all(
            abs(a * other - b * weight) <= most * abs(a * other) for a, b in zip(divisors, others, strict=True)
        ):
            return
        raise LOSS_DIVISORS.refusal(
            f"the loss divides by {_shown(others)} in one microbatch and by {_shown(divisors)} in another (targets "
            f"that count, or the weights of their classes), but by their samples these count {other:.4g} and "
            f"{weight:.4g} of the minibatch"
        )


def _to_host(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _cross_entropies(start: Any, ends: set[Any]) -> list[Any]:
    seen, left, found = {None, *ends}, [start], []
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        name = node.name()
        if _UNREADABLE in name:
            raise LOSS_DIVISORS.refusal(
                "the loss calls F.linear_cross_entropy in chunks, whose graph does not tell what it divides by"
            )
        if name in _CROSS_ENTROPIES:
            if node._saved_reduction == _MEAN:
                found.append(node)
        else:
            left += map(_NODE, node.next_functions)
    return found


def _divisor(node: Any) -> Tensor:
    """What it divides by: exactly, where that is a number of targets."""
    total: Tensor = node._saved_total_weight
    if total.itemsize > 2 or node._saved_weight is not None:
        return total
    kept: Tensor = node._saved_target != node._saved_ignore_index
    return kept.sum()


def _shown(divisors: list[float]) -> str:
    return " and ".join(f"{divisor:.4g}" for divisor in divisors) or "nothing"
