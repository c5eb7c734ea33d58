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

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gapless.run.streams.replicas.replica import Replica, copy_state


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
        self._model, self._replicas, self.schedulers = model, replicas, schedulers
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
        self.optimizers[replica.number].step()
        if self.schedulers[replica.number] is not None:
            self.schedulers[replica.number].step()

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
        with torch.no_grad():
            parameters = zip(self._model.parameters(), *(each.parameters for each in came), strict=True)
            for parameter, *theirs in parameters:
                if parameter.requires_grad:
                    parameter.copy_(mean(theirs))
            for module, *others in zip(self._model.modules(), *(each.module.modules() for each in came), strict=True):
                for name in others[0]._buffers:
                    module._buffers[name] = mean_buffer([each._buffers.get(name) for each in others])
            if self.average_state:
                self._average([self.optimizers[each.number] for each in came], [each.parameters for each in came])

    def _average(self, optimizers: Sequence[Optimizer], parameters: Sequence[Sequence[Tensor]]) -> None:
        for same in zip(*parameters, strict=True):
            states = [each.state.get(one, {}) for each, one in zip(optimizers, same, strict=True)]
            for name in states[0]:
                values = [state.get(name) for state in states]
                tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
                if name != "step" and len(tensors) == len(values):
                    value_of_all = mean(tensors)
                    for value in tensors:
                        value.copy_(value_of_all)


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """Added up in this order."""
    total = tensors[0].clone()
    for each in tensors[1:]:
        total.add_(each)
    return total.div_(len(tensors))


def mean_buffer(buffers: Sequence[Tensor | None]) -> Tensor | None:
    """The first, where they have no mean."""
    there = [each for each in buffers if each is not None and each.is_floating_point()]
    if len(there) == len(buffers) and len({each.shape for each in there}) == 1:
        return mean(there)
    return None if buffers[0] is None else buffers[0].clone()
