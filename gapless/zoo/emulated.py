"""A layer that only takes time: it stands for a device that this machine does not have.

Its forward and both halves of its backward last as long as they are told to, with the interpreter's lock released, so
that many such devices fit on a few cores. It is a real layer all the same: `y = x + w`, with a gradient for both. A
sleep lasts longer than it was asked to, by a span that depends on the machine; that span is measured once and taken
off. What the layer itself costs the host is kept small, since it is not what is to be measured: the backward is one
hook. torch.distributed.pipelining splits a backward by walking its graph, which takes a node for each half
(`separate`):

    x --- begin -------+--- y        begin's backward sleeps `input_grad`
    w --- hold -------/              hold's backward sleeps `weight_grad`
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from gapless.stage.deferred import add_grad, defer


@functools.cache
def overshoot() -> float:
    """By how many seconds a sleep on this machine is too long: the median of some, measured at the first call."""
    late = []
    for _ in range(25):
        begin = time.perf_counter()
        time.sleep(0.002)
        late.append(time.perf_counter() - begin - 0.002)
    return min(statistics.median(late), 0.0005)


def wait_until(deadline: float) -> None:
    """Sleeps until `time.perf_counter()` is `deadline`."""
    left = deadline - time.perf_counter() - overshoot()
    if left > 0:
        time.sleep(left)


class _Begin(torch.autograd.Function):
    """x, with the first half of the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        wait_until(time.perf_counter() + ctx.seconds)
        return grads[0], None


class _Hold(torch.autograd.Function):
    """w, with the second half of the backward."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return w.view_as(w)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _after(ctx.seconds, grads[0]), None


_begin: Any = _Begin.apply
_hold: Any = _Hold.apply


def _after(seconds: float, grad: Tensor) -> Tensor:
    wait_until(time.perf_counter() + seconds)
    return grad


def _both_halves(weight: Tensor, input_grad: float, weight_grad: float, grads: tuple[Tensor, ...]) -> None:
    """Called before the gradient of y goes on to x."""
    end = time.perf_counter() + input_grad
    grad = grads[0].sum().view(1)
    wait_until(end)
    now = defer(weight, functools.partial(_after, weight_grad, grad))
    if now is not None:
        add_grad(weight, now)


class Emulated(nn.Module):
    """`y = x + w` in exactly `forward` seconds, and backward in `input_grad` + `weight_grad`.

    A sample is `size` floats. `separate` makes the two halves of the backward nodes of their own.
    """

    draws_nothing_and_defers_itself = True  # so a stage need not watch what it does

    def __init__(
        self, *, forward: float, input_grad: float, weight_grad: float, size: int = 1, separate: bool = False
    ) -> None:
        super().__init__()
        self.seconds = (forward, input_grad, weight_grad)
        self.size = size
        self.separate = separate
        self.weight = nn.Parameter(torch.zeros(1))
        overshoot()

    def samples(self, count: int) -> Tensor:
        """So many samples for the first layer."""
        return torch.linspace(-1.0, 1.0, count * self.size).view(count, self.size)

    def forward(self, x: Tensor) -> Tensor:
        forward, input_grad, weight_grad = self.seconds
        end = time.perf_counter() + forward
        if self.separate or not x.requires_grad or not torch.is_grad_enabled():
            y: Tensor = _begin(x, input_grad) + _hold(self.weight, weight_grad)
        else:
            y = x + self.weight.detach()
            assert y.grad_fn is not None
            y.grad_fn.register_prehook(functools.partial(_both_halves, self.weight, input_grad, weight_grad))
        wait_until(end)
        return y

    def extra_repr(self) -> str:
        forward, input_grad, weight_grad = self.seconds
        return f"forward={forward}, input_grad={input_grad}, weight_grad={weight_grad}, size={self.size}"
