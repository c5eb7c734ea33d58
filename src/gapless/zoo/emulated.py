"""A layer that only takes time: it stands for a device that this machine does not have.

Its forward and both halves of its backward last as long as they are told to, with the interpreter's lock released, so
that many such devices fit on a few cores. It is a real layer all the same, with a gradient for both x and w:

    y = x, and w - w.detach() is added to the first number of each sample

The numbers of x stay where they are: to add something to all of them would take a processor, with large samples as much
as to send them to another process. A sleep lasts longer than it was asked to, by a span that depends on the machine;
that span is measured once and taken off. What the layer itself costs the host is kept small, since it is not what is to
be measured: the backward is one hook. torch.distributed.pipelining splits a backward by walking its graph, which takes
a node for each half (`separate`):

    x --- waiting -----+--- y        its backward sleeps `input_grad`
    w --- waiting ----/              its backward sleeps `weight_grad`
"""

import functools
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from gapless.stage.split.deferred import add_grad, defer

_now, _sleep = time.perf_counter, time.sleep


@functools.cache
def overshoot() -> float:
    """By how many seconds a sleep on this machine is too long, measured at the first call: what three of four sleeps
    exceed. On a busy machine most are later still, and whoever took that off would emulate devices that are too quick.
    """
    late = []
    for _ in range(25):
        begin = time.perf_counter()
        time.sleep(0.002)
        late.append(time.perf_counter() - begin - 0.002)
    return min(statistics.quantiles(late, n=4)[0], 0.0005)


def wait_until(deadline: float) -> None:
    """Sleeps until `time.perf_counter()` is `deadline`."""
    left = deadline - _now() - overshoot()
    if left > 0:
        _sleep(left)


class _Waiting(torch.autograd.Function):
    """The same tensor, whose backward takes so many seconds."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        wait_until(_now() + ctx.seconds)
        return grads[0], None


class _Joined(torch.autograd.Function):
    """x, with w as a part of its first numbers; no view, since torch.distributed.pipelining detaches it in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return x.data

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], _of_weight(grads[0])


_waiting: Any = _Waiting.apply
_joined: Any = _Joined.apply


def _of_weight(grad: Tensor) -> Tensor:
    return grad.sum() if grad.size(1) == 1 else grad[:, 0].sum()  # to take a column costs as much as to sum it


def _of_weight_after(seconds: float, grad: Tensor) -> Tensor:
    end = _now() + seconds
    grad = _of_weight(grad)
    wait_until(end)
    return grad


class Emulated(nn.Module):
    """`y = x` in exactly `forward` seconds, and backward in `input_grad` + `weight_grad`.

    A sample is `size` floats. `separate` makes the two halves of the backward nodes of their own. `weights`: how many
    it has besides, with a gradient of zeros, for whoever exchanges gradients or updates weights.
    """

    draws_nothing_and_defers_itself = True  # so a stage need not watch what it does

    def __init__(
        self,
        *,
        forward: float,
        input_grad: float,
        weight_grad: float,
        size: int = 1,
        separate: bool = False,
        weights: int = 0,
    ) -> None:
        super().__init__()
        self.seconds = (forward, input_grad, weight_grad)
        self.size = size
        self.separate = separate
        self.weight = nn.Parameter(torch.zeros(()))
        self.register_parameter("more", nn.Parameter(torch.zeros(weights)) if weights else None)
        self._zeros = torch.zeros(weights)
        overshoot()

    def samples(self, count: int) -> Tensor:
        """So many samples for the first layer."""
        return torch.linspace(-1.0, 1.0, count * self.size).view(count, self.size)

    def forward(self, x: Tensor) -> Tensor:
        end = _now() + self.seconds[0]
        weight = self._parameters["weight"]
        assert weight is not None
        if self.separate or not x.requires_grad or not torch.is_grad_enabled():
            y: Tensor = _joined(_waiting(x, self.seconds[1]), _waiting(weight, self.seconds[2]))
        else:
            y = x.view_as(x)
            y.grad_fn.register_prehook(functools.partial(self._backward, weight, self._parameters["more"]))  # type: ignore[union-attr]
        wait_until(end)
        return y

    def _backward(
        self, weight: nn.Parameter, more: nn.Parameter | None, grads: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Called before the gradient of y goes on to x, as a tensor of its own: autograd copies one that others hold.
        What it costs itself is part of the time it takes. The weight is that of the forward: by now the layer may have
        another version of it.
        """
        _, input_grad, weight_grad = self.seconds
        end = _now() + input_grad
        now = defer(weight, functools.partial(_of_weight_after, weight_grad, grads[0]))
        if now is not None:
            end += weight_grad
            add_grad(weight, now)
        if more is not None:
            add_grad(more, self._zeros, shared=True)
        passed = (grads[0].detach(),)
        wait_until(end)
        return passed

    def extra_repr(self) -> str:
        forward, input_grad, weight_grad = self.seconds
        return f"forward={forward}, input_grad={input_grad}, weight_grad={weight_grad}, size={self.size}"
