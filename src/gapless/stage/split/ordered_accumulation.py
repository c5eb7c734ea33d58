"""Gradients that wait for their turn: a schedule of one's own may run a stage's backwards in any order, but the plain
loop adds to `.grad` in microbatch order, and so does every stage.

    backward of    2            0            1
    adds           nothing      0            1, 2        2 has waited, in memory of its own
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from gapless.guards.weights_and_gradients import GRADIENT_HOOKS

T = TypeVar("T")


class Turns:
    """The gradients of one stage in one step."""

    def __init__(self, parameters: Callable[[], Sequence[Parameter]], microbatches: int) -> None:
        self._parameters = parameters
        self._microbatches = microbatches
        self.clear()

    def clear(self) -> None:
        """A step starts."""
        self._waiting: dict[int, list[tuple[Parameter, Tensor]]] = {}
        self._over: set[int] = set()
        self._next = 0

    def taken(self, microbatch: int, run: Callable[[], T], *, last: bool) -> T:
        """Runs a backward, or half of one, and adds its gradients when all microbatches before it are done; `last` says
        that no other half of it is to come.
        """
        parameters = self._parameters()
        if any(each._post_accumulate_grad_hooks for each in parameters):
            raise GRADIENT_HOOKS.refusal(
                "a parameter has a hook that runs after its gradient is added, but this schedule runs backwards out "
                "of microbatch order and adds gradients later",
                f"{GRADIENT_HOOKS.way_out}, or choose another schedule",
            )
        before = [each.grad for each in parameters]
        for each in parameters:
            each.grad = None
        try:
            result = run()
        finally:
            made = self._waiting.setdefault(microbatch, [])
            for each, grad in zip(parameters, before, strict=True):
                if each.grad is not None:
                    made.append((each, each.grad))
                each.grad = grad
        if last:
            self._over.add(microbatch)
        while self._next in self._over:
            with torch.no_grad():
                for parameter, grad in self._waiting.pop(self._next):
                    _add(parameter, grad)
            self._next += 1
        if self._next == self._microbatches:
            self.clear()
        return result


def _add(parameter: Parameter, grad: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad.add_(grad)
