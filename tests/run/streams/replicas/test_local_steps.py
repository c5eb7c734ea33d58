"""Replicas that step alone and average their weights: to the bit what one loop does for one replica after another."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from tests.by_hand import seeded_loop
from tests.pipelines import alive, mlp
from tests.run.streams.replicas.test_asp import SEED, Make, adam, batches, sgd


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def plain() -> nn.Sequential:
    torch.manual_seed(3)
    return mlp(dropout=0.3)


def normed() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 6))


def mean(tensors: list[Tensor]) -> Tensor:
    total = torch.clone(tensors[0])
    for each in tensors[1:]:
        total = total + each
    return total / len(tensors)


class Sequential:
    """One loop for all: n steps of replica 0, then of replica 1, ..., then the mean of those that had any."""

    def __init__(self, model: nn.Sequential, replicas: int, make: Make, *, average_state: bool = False) -> None:
        self.model, self.average_state = model, average_state
        self.copies = [copy.deepcopy(model) for _ in range(replicas)]
        self.optimizers = [make(list(each.parameters())) for each in self.copies]
        self.schedulers = [halving(each) for each in self.optimizers]

    def run(self, data: list[Any], steps: int, first: int = 0) -> list[Tensor]:
        losses: list[Tensor] = [torch.tensor(0.0)] * len(data)
        count = len(self.copies)
        for start in range(0, len(data), count * steps):
            part = range(start, min(start + count * steps, len(data)))
            came = [
                number for number in range(count) if any(each % count == number for each in (m - start for m in part))
            ]
            for number in came:
                self.copies[number].load_state_dict(self.model.state_dict())
                for minibatch in part:
                    if (minibatch - start) % count == number:
                        losses[minibatch] = self.step(number, first + minibatch, *data[minibatch])
            states = [self.copies[number].state_dict() for number in came]
            self.model.load_state_dict(
                {
                    name: mean([state[name] for state in states]) if value.is_floating_point() else value
                    for name, value in states[0].items()
                }
            )
            if self.average_state:
                self.average(came)
        return losses

    def step(self, number: int, minibatch: int, x: Tensor, y: Tensor) -> Tensor:
        self.optimizers[number].zero_grad()
        (loss,) = seeded_loop(self.copies[number], x, y, microbatches=1, seed=SEED, step=minibatch)
        self.optimizers[number].step()
        self.schedulers[number].step()
        return loss

    def average(self, came: list[int]) -> None:
        for parameters in zip(*(self.copies[number].parameters() for number in came), strict=True):
            states = [self.optimizers[n].state[p] for n, p in zip(came, parameters, strict=True)]
            for name in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
                if name in states[0]:
                    value = mean([state[name] for state in states])
                    for state in states:
                        state[name] = value.clone()


@pytest.mark.in_pairs
@pytest.mark.parametrize("average_state", [False, True])
@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("model", [plain, normed])
@pytest.mark.parametrize(("replicas", "steps", "count"), [(3, 2, 12), (2, 3, 13), (3, 4, 7), (4, 1, 10), (1, 2, 5)])
def test_weights_are_those_of_one_loop_for_all_replicas(
    replicas: int, steps: int, count: int, model: Callable[[], nn.Sequential], make: Make, average_state: bool
) -> None:
    ours, theirs, data = model(), model(), batches(count)
    reference = Sequential(theirs, replicas, make, average_state=average_state)
    with gapless.AsyncReplicas(
        ours,
        replicas=replicas,
        loss=F.mse_loss,
        optimizer=make,
        scheduler=halving,
        local_steps=steps,
        average_state=average_state,
        seed=SEED,
    ) as asp:
        for first in (0, count):  # the second run goes on with the optimizers as they are
            results = list(asp.run(data))
            losses = reference.run(data, steps, first)
            assert [result.minibatch for result in results] == list(range(first, first + count))
            for result, loss in zip(results, losses, strict=True):
                assert torch.equal(result.loss, loss)
            for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
                assert torch.equal(a, b), name
        assert asp.updates == asp.minibatches == 2 * count


def test_results_say_which_replica_and_what_it_has_not_seen() -> None:
    with gapless.AsyncReplicas(plain(), replicas=2, loss=F.mse_loss, optimizer=sgd, local_steps=2) as asp:
        results = list(asp.run(batches(6)))
        assert len(asp.optimizers) == 2
    assert [(each.replica, each.staleness) for each in results] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 0), (1, 0)]


def test_after_a_failure_the_model_has_the_last_average() -> None:
    data = batches(8)
    data[6][1].fill_(float("nan"))
    ours, theirs = plain(), plain()
    with gapless.AsyncReplicas(
        ours, replicas=2, loss=F.mse_loss, optimizer=sgd, scheduler=halving, local_steps=2, seed=SEED
    ) as asp:
        with pytest.raises(gapless.GaplessError, match="is not finite, with a loss of nan") as caught:
            list(asp.run(data))
        assert "in replica 0, minibatch 6" in caught.value.__notes__[0]
        assert not alive("gapless replica")
    Sequential(theirs, 2, sgd).run(data[:4], 2)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_leaving_the_loop_stops_the_threads() -> None:
    with gapless.AsyncReplicas(plain(), replicas=2, loss=F.mse_loss, optimizer=sgd, local_steps=2) as asp:
        for result in asp.run(batches(30)):
            if result.minibatch == 3:
                break
        assert not alive("gapless replica")
        assert len(list(asp.run(batches(6)))) == 6


def test_there_is_no_order_that_could_be_replayed() -> None:
    asp = gapless.AsyncReplicas(plain(), replicas=2, loss=F.mse_loss, optimizer=sgd, local_steps=2)
    with pytest.raises(gapless.GaplessError, match="with local_steps timing changes nothing, so there is no order"):
        asp.order  # noqa: B018
