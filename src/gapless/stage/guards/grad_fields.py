"""`.grad` and `.requires_grad` of a weight, in a forward.

In the plain loop every backward comes before the next forward. Here other microbatches are under way: their part of
`.grad` is still missing, and autograd asks for `.requires_grad` when their backward runs. Where none is under way, both
are what they are in the plain loop.
"""

from collections.abc import Collection
from typing import Any

from torch import Tensor

from gapless.guards.weights_and_gradients import FORWARD_GRADS, FROZEN_WEIGHTS
from gapless.stage.split.call_mode import Handler, Mode


def _grad(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight = args[0]
    if _is_weight(mode, weight):
        mode.behind += 1
        if _others(mode) if _is_own(mode, weight) else mode.at[1] > 0:
            raise FORWARD_GRADS.refusal(
                f"a layer or the loss reads .grad of a weight of shape {tuple(weight.shape)} in its forward, and it "
                "lacks the gradients of other microbatches in flight"
            )
    return mode.plain(func, args, kwargs)


def _switch(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _is_weight(mode, args[0]):
        mode.behind += 1
        mode.switched.setdefault(id(args[0]), (args[0], args[0].requires_grad))
    return mode.plain(func, args, kwargs)


def check_switched(mode: Mode, shared: Collection[Tensor]) -> None:
    """A forward is over. It may have left a weight frozen or thawed, but for those that others use too."""
    left = [weight for weight, before in mode.switched.values() if weight.requires_grad is not before]
    mode.switched.clear()
    for weight in left:
        if _others(mode) or not _is_own(mode, weight) or any(weight is each for each in shared):
            raise FROZEN_WEIGHTS.refusal(
                f"a forward has frozen or unfrozen a weight of shape {tuple(weight.shape)} with requires_grad_, which "
                "would also affect the backward of another microbatch, or another stage"
            )


def _others(mode: Mode) -> bool:
    """Whether other microbatches are under way in this cell, or this one for the second time."""
    microbatch, _, replaying, under_way = mode.at
    return replaying or any(each != microbatch for each in under_way)


def _is_weight(mode: Mode, tensor: Tensor) -> bool:
    return id(tensor) in mode.weights or mode.stands_in(tensor)


def _is_own(mode: Mode, weight: Tensor) -> bool:
    return mode.stands_in(weight) or any(weight is each for part in mode.modules for each in part.parameters())


_fields: Any = Tensor
HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys((_fields.grad.__get__, _fields.grad.__set__, _fields.grad.__delete__), _grad),
    **dict.fromkeys((_fields.requires_grad.__set__, Tensor.requires_grad_), _switch),
}
