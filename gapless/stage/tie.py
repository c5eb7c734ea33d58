"""A parameter that several stages use: an embedding and the head that shares its weight.

The plain loop adds up the contributions of one microbatch in autograd's order, from the last use to the first, and
accumulates the sum once. Stages run their backwards of one microbatch in that very order, so each hands its sum to the
stage before it, which goes on adding where that one stopped, and the first one accumulates:

    stage 3:  c = g3          stage 1:  c = c + g1          stage 0:  .grad += c + g0

So only one stage writes `.grad`, in microbatch order, and a sum waits no longer than from one backward to the next.
With `summed` each stage adds up its own over all microbatches, and the sums meet at the end of the step.

Where the stages are in several processes, each has its copy of the parameter. What one hands to another goes through
`Away`, and at the end of the step the first stage's process, the home, hands its gradient to all others.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter

from gapless.errors import ConfigError

from .deferred import noted

Tied = Literal["exact", "summed"]


class _Running(threading.local):
    place: tuple[int, int] | None = None  # stage and microbatch


_running = _Running()
_tasks: dict[int, tuple[int, int]] = {}  # by graph task: on an accelerator the backward runs in autograd's own threads


class Away(Protocol):
    """The stages of other processes, for one shared parameter."""

    def is_here(self, stage: int) -> bool:
        """Whether a stage is in this process."""

    def hand(self, stage: int, microbatch: int, grad: Tensor | None) -> None:
        """Give a sum to a stage elsewhere, or word that there is none. Does not wait."""

    def take(self, stage: int, microbatch: int) -> Tensor | None:
        """What a stage elsewhere has handed over."""


class Tie:
    """One shared parameter, the stages that use it, and what is under way between them."""

    def __init__(
        self, name: str, parameter: Parameter, stages: Sequence[int], tied: Tied, away: Away | None = None
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.stages = sorted(stages)
        self.is_home = away is None or away.is_here(self.stages[0])
        self._home = self.stages[0]
        self._summed = tied == "summed"
        self._away = away
        self._handed: set[tuple[int, int]] = set()
        self._carried: dict[int, tuple[Tensor, Any]] = {}  # and on an accelerator the event after which it is there
        self._sums: dict[int, Tensor] = {}
        self._node: Any = None
        self._handle: Any = None

    def begin(self) -> None:
        """A step starts: nothing is under way, and gradients that arrive in other stages are caught."""
        self._carried.clear()
        self._handed.clear()
        self._sums.clear()
        parameter = self.parameter
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ConfigError(
                f"{self.name} is shared by several stages and has a hook, which would see parts of its gradient: "
                "choose a partition that keeps its uses in one stage, or remove the hook"
            )
        if parameter.requires_grad and self._handle is None:
            self._node = get_gradient_edge(parameter).node
            self._handle = self._node.register_prehook(self._arrived)

    def end(self) -> None:
        """The step is over: sums meet, the last stage's first."""
        self.release()
        if self._summed and not self.is_home:
            for stage in self.stages[:0:-1]:
                if self._is_here(stage):
                    self._hand(self._home, stage, self._sums.get(stage))
        elif self._summed:
            self._meet()
        self._sums.clear()
        self._carried.clear()

    def release(self) -> None:
        """Catches nothing any more, even if the step has failed."""
        if self._handle is not None:
            self._handle.remove()
            self._node = self._handle = None

    def _meet(self) -> None:
        with torch.no_grad():
            for stage in self.stages[:0:-1]:
                total = self._sums.get(stage) if self._is_here(stage) else self._take(stage, stage)
                if total is None:
                    continue
                if self.parameter.grad is None:
                    self.parameter.grad = total
                else:
                    self.parameter.grad.add_(total)

    def _is_here(self, stage: int) -> bool:
        return self._away is None or self._away.is_here(stage)

    def _hand(self, stage: int, number: int, grad: Tensor | None) -> None:
        assert self._away is not None
        self._away.hand(stage, number, grad)

    def _take(self, stage: int, number: int) -> Tensor | None:
        assert self._away is not None
        return self._away.take(stage, number)

    def seed(self, stage: int, microbatch: int) -> tuple[GradientEdge, Tensor] | None:
        """What later stages have added up for this microbatch: the sum goes on from there."""
        later = next((each for each in self.stages if each > stage), None)
        if not self._summed and later is not None and not self._is_here(later):
            carried_here = self._take(later, microbatch)
            return None if carried_here is None else (get_gradient_edge(self.parameter), carried_here)
        if microbatch not in self._carried:
            return None
        carried, event = self._carried.pop(microbatch)
        if event is not None:  # stages have streams of their own
            stream = torch.cuda.current_stream(carried.device)
            stream.wait_event(event)
            carried.record_stream(stream)
        return get_gradient_edge(self.parameter), carried

    def _arrived(self, grads: tuple[Tensor | None, ...]) -> tuple[None] | None:
        place = _running.place or _tasks.get(torch._C._current_graph_task_id())
        grad = grads[0]
        if place is None or place[0] == self._home or grad is None:
            return None
        stage, microbatch = place
        earlier = max(each for each in self.stages if each < stage)
        if not self._summed and not self._is_here(earlier):
            self._handed.add(place)
            self._hand(earlier, microbatch, grad)
        elif not self._summed:
            event = torch.cuda.current_stream(grad.device).record_event() if grad.is_cuda else None
            self._carried[microbatch] = (grad, event)
        elif stage in self._sums:
            self._sums[stage].add_(grad)
        else:
            self._sums[stage] = torch.empty_like(self.parameter).copy_(grad)
        return (None,)

    def passed(self, stage: int, microbatch: int) -> None:
        """A backward is over: whoever waits elsewhere for its sum must not wait for ever."""
        if self._summed or self._away is None or stage == self._home or (stage, microbatch) in self._handed:
            return
        earlier = max(each for each in self.stages if each < stage)
        if not self._is_here(earlier):
            self._hand(earlier, microbatch, None)


@contextlib.contextmanager
def running(stage: int, microbatch: int, edges: Sequence[GradientEdge], device: torch.device) -> Iterator[None]:
    """While it holds, gradients of shared parameters belong to this stage and microbatch."""
    place = (stage, microbatch)
    if device.type == "cpu":
        _running.place = place
        try:
            yield
        finally:
            _running.place = None
        return
    with noted(_tasks, place, edges):
        yield
