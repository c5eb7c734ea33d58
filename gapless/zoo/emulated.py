"""A layer that only takes time: it stands for a device that this machine does not have.

Its forward and both halves of its backward last as long as they are told to, with the interpreter's lock released, so
that many such devices fit on a few cores. It is a real layer all the same: `y = x * w`, with a gradient for both. A
sleep lasts longer than it was asked to, by a span that depends on the machine; that span is learnt and taken off, and
the rest, some microseconds, is waited out.

The two halves are separate nodes of the graph, so whoever splits a backward, gapless by `defer` or
torch.distributed.pipelining by walking the graph, sleeps for each half where it runs it:

    x --- begin -------*--- y        begin's backward sleeps `input_grad`
    w --- hold -------/              hold's backward sleeps `weight_grad`
"""

from __future__ import annotations

import functools
import select
import time
from typing import Any

import torch
from torch import Tensor, nn

from gapless.stage.deferred import defer


class _Sleep:
    """Sleeps that end on time: too early by the machine's usual overshoot, learnt from every sleep, then yielding."""

    longest = 0.00015  # what is taken off at most, and so the longest time spent yielding

    def __init__(self) -> None:
        self._mean = 0.00008
        self._deviation = 0.00002

    @property
    def overshoot(self) -> float:
        """By how many seconds a sleep may be too long."""
        return min(self._mean + self._deviation, self.longest)

    def until(self, deadline: float) -> None:
        """Returns when `time.perf_counter()` is `deadline`."""
        now = time.perf_counter()
        wake = deadline - self.overshoot
        if wake > now:
            time.sleep(wake - now)
            now = time.perf_counter()
            error = min(now - wake, 2 * self.longest) - self._mean
            self._mean += error / 8
            self._deviation += (abs(error) - self._deviation) / 8
        while now < deadline:
            select.select((), (), (), 0)  # lets go of the interpreter's lock, and unlike sleep(0) returns at once
            now = time.perf_counter()


@functools.cache
def the_sleep() -> _Sleep:
    """The one of this process, calibrated at the first call."""
    sleep = _Sleep()
    for _ in range(10):
        sleep.until(time.perf_counter() + 0.001)
    return sleep


def wait_until(deadline: float) -> None:
    """Sleeps until `time.perf_counter()` is `deadline`."""
    the_sleep().until(deadline)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        wait_until(time.perf_counter() + ctx.seconds)
        return grads[0], None


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(w)
        ctx.seconds = seconds
        return w.view_as(w)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (w,) = ctx.saved_tensors
        return defer(w, functools.partial(_after, ctx.seconds, grads[0])), None


_begin: Any = _Begin.apply
_hold: Any = _Hold.apply


def _after(seconds: float, grad: Tensor) -> Tensor:
    wait_until(time.perf_counter() + seconds)
    return grad


class Emulated(nn.Module):
    """`y = x * w` in exactly `forward` seconds, and backward in `input_grad` + `weight_grad`; samples are `size`
    floats.
    """

    def __init__(self, *, forward: float, input_grad: float, weight_grad: float, size: int = 1) -> None:
        super().__init__()
        self.seconds = (forward, input_grad, weight_grad)
        self.size = size
        self.weight = nn.Parameter(torch.ones(1))
        the_sleep()

    def samples(self, count: int) -> Tensor:
        """So many samples for the first layer."""
        return torch.linspace(-1.0, 1.0, count * self.size).view(count, self.size)

    def forward(self, x: Tensor) -> Tensor:
        forward, input_grad, weight_grad = self.seconds
        end = time.perf_counter() + forward
        y: Tensor = _begin(x, input_grad) * _hold(self.weight, weight_grad)
        wait_until(end)
        return y

    def extra_repr(self) -> str:
        forward, input_grad, weight_grad = self.seconds
        return f"forward={forward}, input_grad={input_grad}, weight_grad={weight_grad}, size={self.size}"
