"""Asynchronous parallel (ASP): replicas apply their gradients to shared weights, and none waits for another.

    replica 0   read v0 |------ gradient ------| apply -> v2              staleness 1
    replica 1    read v0 |---- gradient ----| apply -> v1, read v1 ...    staleness 0

A read is a consistent copy of the weights as some update has left them, never half of one. The optimizer and its state
exist once. With a bound (stale synchronous parallel: Ho et al., NIPS 2013) a replica does not read while it has applied
more than that many updates more than the slowest; then an update's staleness is at most (R-1)(2b+1), for R replicas and
the bound b. Buffers are the model's as they were at the read, and after an apply those of the replica: who applies last
has them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gapless.guards.weights_and_gradients import WEIGHTS_ELSEWHERE
from gapless.run.streams.replicas.order import Move, Order
from gapless.run.streams.replicas.replica import Replica
from gapless.run.streams.replicas.replica_state import buffers_of, copy_state, put_buffers


class Asp:
    """The shared weights, and who has read and applied what; whoever calls sees to it that nobody else does."""

    def __init__(
        self, model: nn.Module, replicas: int, optimizer: Optimizer, scheduler: Any, bound: int | None
    ) -> None:
        self.optimizers: tuple[Optimizer, ...] = (optimizer,)
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._parameters = list(model.named_parameters())
        self._bound = bound
        self._reads = [Move(number, "r") for number in range(replicas)]
        self._applies = [Move(number, "a") for number in range(replicas)]
        self.updates = 0
        self.begin(0)

    def begin(self, first: int) -> None:
        """A run starts, with this minibatch."""
        self.next = first
        self._moves: list[Move] = []
        self._applied = [0] * len(self._reads)
        self._seen = [0] * len(self._reads)  # the updates in what a replica has read
        self._gone: set[int] = set()  # replicas that have nothing more to do
        for _, parameter in self._parameters:
            parameter.grad = None

    @property
    def order(self) -> Order:
        """Of this run, up to now."""
        return Order(tuple(self._moves))

    def wanted(self, replica: int) -> int | None:
        """The minibatch that this replica may begin, or None while it is too far ahead."""
        others = [applied for number, applied in enumerate(self._applied) if number not in self._gone]
        ahead = self._applied[replica] - min(others, default=0)
        return None if self._bound is not None and ahead > self._bound else self.next

    def leave(self, replica: int) -> None:
        """It has nothing more to do, and nobody waits for it."""
        self._gone.add(replica)

    def read(self, replica: Replica) -> None:
        """It begins the next minibatch."""
        copy_state(self._model, replica.module, trained_only=True)
        self.note_read(replica.number)

    def note_read(self, replica: int) -> None:
        """The weights as they are now are those of its next minibatch."""
        self._seen[replica] = self.updates
        self._moves.append(self._reads[replica])
        self.next += 1

    def learn(self, replica: Replica) -> None:
        """It has its gradient: nothing to do before it is applied."""

    def apply(self, replica: Replica) -> int:
        """Its gradient goes into the weights; returns the staleness."""
        staleness = self.step(replica.number, replica.grads)
        with torch.no_grad():
            put_buffers(self._model, buffers_of(replica.module, copied=False))
        return staleness

    def step(self, replica: int, grads: Sequence[Tensor | None]) -> int:
        """The same for a gradient that comes without its replica, which leaves the buffers to the caller."""
        for (name, parameter), grad in zip(self._parameters, grads, strict=True):
            if parameter.grad is not None:
                raise WEIGHTS_ELSEWHERE.refusal(
                    f"the loss or a layer uses {name} of the model itself, but replicas have copies of it, and its "
                    "gradient would be lost",
                    "use the layer's own weights, or weight_decay for a penalty",
                )
            parameter.grad = None if grad is None else grad.to(parameter.device)
        try:
            self._optimizer.step()
            if self._scheduler is not None:
                self._scheduler.step()
        finally:
            for _, parameter in self._parameters:
                parameter.grad = None
        staleness = self.updates - self._seen[replica]
        self.updates += 1
        self._applied[replica] += 1
        self._moves.append(self._applies[replica])
        return staleness

    def finish(self) -> None:
        """The run is over: the weights are in the model already."""
