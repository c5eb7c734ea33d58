"""Local steps: each replica has weights and an optimizer of its own, and every n steps the weights are averaged.

    replica 0   step step step |         | step ...
    replica 1   step  step step| average | step ...          n = 3

Minibatch m of a run is of replica m mod R. The mean is added up in replica order, so nothing depends on who was first.
When the minibatches end in the middle of a round, the replicas that have stepped in it are averaged. Buffers are
averaged with the weights, if they are floating-point numbers, and taken from the first replica else. The optimizers'
state stays where it is, or is averaged too, if asked for: all but the count of steps.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gapless.run.streams.replicas.replica import Replica
from gapless.run.streams.replicas.replica_state import (
    averaged,
    copy_state,
    optimizer_state_of,
    put_optimizer_state,
    put_state,
    state_of,
)


class LocalSteps:
    """The replicas' optimizers, and how far each is; whoever calls all but `learn` sees to it that nobody else does."""

    def __init__(
        self,
        model: nn.Module,
        replicas: Sequence[Replica],
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
        steps: int,
        *,
        average_state: bool,
    ) -> None:
        self.optimizers = tuple(optimizers)
        self._model, self._replicas, self._schedulers = model, replicas, schedulers
        self.steps, self.average_state = steps, average_state
        self.updates = 0
        self.begin(0)

    def begin(self, first: int) -> None:
        """A run starts, with this minibatch."""
        self.next = self._base = first
        self._done = [0] * len(self._replicas)  # in this round

    def wanted(self, replica: int) -> int | None:
        """The minibatch that this replica may begin, or None while it waits for the average."""
        done = self._done[replica]
        return None if done == self.steps else self._base + done * len(self._replicas) + replica

    def read(self, replica: Replica) -> None:
        """It begins a minibatch, in a new round with the weights of all."""
        minibatch = self.wanted(replica.number)
        assert minibatch is not None
        self.next = max(self.next, minibatch + 1)
        if not self._done[replica.number]:
            copy_state(self._model, replica.module, trained_only=True)

    def learn(self, replica: Replica) -> None:
        """It has its gradient, and steps."""
        place = self._replicas.index(replica)  # a rank has one of them, whatever its number
        self.optimizers[place].step()
        if self._schedulers[place] is not None:
            self._schedulers[place].step()

    def apply(self, replica: Replica) -> int:
        """Its step is done; returns how many those of the others are that it knew nothing of, if all are as quick."""
        staleness = self._done[replica.number] * (len(self._replicas) - 1)
        self._done[replica.number] += 1
        self.updates += 1
        if min(self._done) == self.steps:
            self.finish()
        return staleness

    def finish(self) -> None:
        """A round is over, or the run: the model has the mean of the replicas that have stepped."""
        came = [replica for replica in self._replicas if self._done[replica.number]]
        self._base, self._done = self.next, [0] * len(self._replicas)
        if not came:
            return
        kept = [
            optimizer_state_of(self.optimizers[each.number], each.parameters) if self.average_state else []
            for each in came
        ]
        states = [state_of(each.module, copied=False) for each in came]
        mean = averaged([{**state, "optimizer": each} for state, each in zip(states, kept, strict=True)])
        put_state(self._model, mean)
        for each in kept:
            put_optimizer_state(each, mean["optimizer"])
