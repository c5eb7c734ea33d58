"""The state of an optimizer in the host's memory: a step brings it to the device in pieces, and sends it back.

device   step(piece 0)  step(piece 1)  step(piece 2)          the arithmetic is the device's, so the bits are those
back     piece 1        piece 2                               of the optimizer without it; two pieces are there at
out                     piece 0        piece 1 ...            a time, one that is stepped and one on its way
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gapless.errors import ConfigError

from . import PIECE

# The step of a parameter depends on nothing of the others.
_INDEPENDENT = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop"),
    *("Rprop", "SGD"),
)
_Key = tuple[Tensor, Any]  # a parameter, and the name of a state of it


def offload_optimizer(optimizer: Optimizer, *, piece: int = PIECE, independent: bool = False) -> Optimizer:
    """Keeps the state of an optimizer in host memory, pinned for a GPU. Returns the same optimizer: schedulers,
    GradScaler, clipping and checkpoints use it as before, and its steps are bit-identical.

    piece        how many bytes of parameters are stepped at a time; the device holds the state of two such pieces
    independent  True if your own optimizer steps each parameter separately, as those of torch.optim do
    """
    kind = type(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"offload_optimizer takes a torch.optim.Optimizer, and this is a {kind.__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("LBFGS steps all parameters together, so its state stays on the device")
    known = kind.__module__.startswith("torch.optim") and kind.__name__ in _INDEPENDENT
    if not known and not independent:
        raise ConfigError(
            f"{kind.__name__} would be stepped in pieces, which is right only if each parameter is stepped by itself: "
            "say independent=True if that is so, or leave its state on the device"
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ConfigError(
            f"{kind.__name__} has step hooks, which would be called for every piece: remove them, or leave its state "
            "on the device"
        )
    if piece < 1:
        raise ConfigError(f"piece is {piece}, but it must be a number of bytes above 0")
    if not isinstance(optimizer.step, OffloadedStep):
        optimizer.step = OffloadedStep(optimizer, piece)  # type: ignore[assignment]
    return optimizer


class OffloadedStep:
    """In the place of an optimizer's `step`."""

    _wrapped_by_lr_sched = True  # torch's schedulers need not put another one around it, which would not call this

    def __init__(self, optimizer: Optimizer, piece: int) -> None:
        self._optimizer, self._piece, self._step = optimizer, piece, optimizer.step
        self._hosts: dict[_Key, Tensor] = {}  # what is in the host's memory, and stays reserved
        self._arriving: dict[_Key, Tensor] = {}
        self._ways: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
        optimizer.register_load_state_dict_post_hook(lambda _: self._leave(self._all()))
        self._leave(self._all())

    def __call__(self, closure: Any = None) -> None:
        if closure is not None:
            raise ConfigError(
                "a closure would run for every piece of an offloaded optimizer: compute the loss first, and step "
                "without it"
            )
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        optimizer._opt_called = True  # type: ignore[attr-defined]  # as schedulers want to know
        pieces = list(self._pieces())
        leaving: list[torch.cuda.Event] = []
        if pieces:
            self._fetch(pieces[0])
        try:
            for number, chosen in enumerate(pieces):
                self._take()
                parts = [(group, params) for group, params in zip(groups, chosen, strict=True) if params]
                optimizer.param_groups = [{**group, "params": params} for group, params in parts]
                self._step()
                for made, (group, params) in zip(optimizer.param_groups, parts, strict=True):
                    given = {**group, "params": params}
                    if made.keys() != given.keys() or any(made[name] is not given[name] for name in given):
                        raise ConfigError(
                            f"{type(optimizer).__name__} keeps state in its parameter groups, which pieces of them "
                            "can't share: leave its state on the device"
                        )
                self._leave(parameter for params in chosen for parameter in params)
                last, leaving = leaving, [out.record_event() for out, _ in self._ways.values()]
                for gone in last:  # the next piece takes its memory, and the host is ahead of its GPUs
                    gone.synchronize()
                if number + 1 < len(pieces):
                    self._fetch(pieces[number + 1])
        finally:
            optimizer.param_groups = groups
            self._arriving.clear()
            self._leave(self._all())
            for out, _ in self._ways.values():
                out.synchronize()  # whoever reads the state next may be the host

    def _all(self) -> list[Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _pieces(self) -> Iterator[list[list[Tensor]]]:
        """Per group those of its parameters that have a gradient, so many bytes at a time."""
        groups = self._optimizer.param_groups
        chosen: list[list[Tensor]] = [[] for _ in groups]
        size = 0
        for number, group in enumerate(groups):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    chosen[number].append(parameter)
                    size += parameter.nbytes
                if size >= self._piece:
                    yield chosen
                    chosen, size = [[] for _ in groups], 0
        if any(chosen):
            yield chosen

    def _fetch(self, chosen: list[list[Tensor]]) -> None:
        """Their states set out for the device."""
        for parameter in (parameter for params in chosen for parameter in params):
            for name, value in self._optimizer.state.get(parameter, {}).items():
                host = self._hosts.get((parameter, name))
                if host is not None and host is value:
                    with self._on(parameter.device, 1):
                        there = host.to(parameter.device, non_blocking=True)
                        self._arriving[parameter, name] = there.clone() if there is host else there

    def _take(self) -> None:
        """What was fetched is there."""
        for (parameter, name), there in self._arriving.items():
            if there.is_cuda:
                now = torch.cuda.current_stream(there.device)
                now.wait_stream(self._ways[there.device][1])
                there.record_stream(now)
            self._optimizer.state[parameter][name] = there
        self._arriving.clear()

    def _leave(self, parameters: Iterable[Tensor]) -> None:
        """Their states go to the host's memory; single numbers stay where the optimizer has them."""
        for parameter in parameters:
            state = self._optimizer.state.get(parameter, {})
            for name, value in state.items():
                host = self._hosts.get((parameter, name))
                if not isinstance(value, Tensor) or value.numel() < 2 or host is value:
                    continue
                if host is None or (host.shape, host.dtype) != (value.shape, value.dtype):
                    host = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
                    self._hosts[parameter, name] = host
                with self._on(value.device, 0):
                    host.copy_(value, non_blocking=True)
                    if value.is_cuda:
                        value.record_stream(torch.cuda.current_stream(value.device))
                state[name] = host

    def _on(self, device: torch.device, way: int) -> contextlib.AbstractContextManager[Any]:
        """Among the copies out (0) or back (1), which begin after what the device does now."""
        if device.type != "cuda":
            return contextlib.nullcontext()
        if device not in self._ways:
            self._ways[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        stream = self._ways[device][way]
        if way == 0:
            stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(stream)
