"""A loader with one buffer overwrites a batch when it is asked for the next: whoever computes later has a copy."""

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.stage.batch.own_copies import own

BATCHES = [torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(step)) for step in range(8)]


class Slow(nn.Linear):
    """The next batch has come when this one is computed."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.002)
        return super().forward(x)


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(Slow(8, 8), nn.Tanh()) for _ in range(4)))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def anew() -> Iterator[tuple[Tensor, Tensor]]:
    yield from ((x.clone(), y.clone()) for x, y in BATCHES)


def in_one_buffer() -> Iterator[tuple[Tensor, Tensor]]:
    x, y = torch.empty(12, 8), torch.empty(12, 8)
    for batch in BATCHES:
        x.copy_(batch[0])
        y.numpy()[:] = batch[1].numpy()  # which no version tells
        yield x, y


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h2"])
def test_a_step_that_does_not_wait_has_a_batch_of_its_own(schedule: str) -> None:
    model, plain = model_of(), model_of()
    optimizer, expected = sgd(plain.parameters()), []
    for batch in BATCHES:
        optimizer.zero_grad()
        parts = [F.mse_loss(plain(x), y) * (1 / 6) for x, y in zip(*(each.split(2) for each in batch), strict=True)]
        for part in parts:
            part.backward()
        expected.append(sum(parts[1:], parts[0]).detach())
        optimizer.step()
    with gapless.Pipeline(model, devices=2, microbatches=6, schedule=schedule, loss=F.mse_loss) as pipe:
        training = pipe.training(sgd(model.parameters()))
        assert [each.loss for each in [training.step(x, y) for x, y in in_one_buffer()]] == expected
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class Halves(nn.Module):
    """Changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5) + 0


@pytest.mark.parametrize("target_of", [lambda x: x, lambda x: x.detach(), lambda x: x.view(12, 2, 4)[:, 0]])
def test_a_target_that_shares_memory_with_the_inputs_still_does(target_of: Callable[[Tensor], Tensor]) -> None:
    model, expected = nn.Sequential(Halves(), *model_of()), []
    plain, x = copy.deepcopy(model), BATCHES[0][0].clone()
    y = target_of(x)
    width = y.shape[-1]
    for part, goal in zip(x.split(2), y.split(2), strict=True):
        expected.append(F.mse_loss(plain(part)[:, :width], goal).detach())
    x = BATCHES[0][0].clone()

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(outputs[:, :width], target)

    with gapless.Pipeline(model, devices=2, microbatches=6, loss=loss, loss_weight=len) as pipe:
        result = pipe.training(sgd(model.parameters())).step(x, target_of(x))
        assert [*result.losses] == expected


def streamed(model: nn.Sequential, loader: Iterator[Any]) -> list[Tensor]:
    with (
        gapless.Pipeline(model, devices=2, microbatches=6, schedule="2bw", loss=F.mse_loss) as pipe,
        pipe.stream(optimizer=sgd) as stream,
    ):
        return [each.loss for each in stream.run(loader)]


def replicated(model: nn.Sequential, loader: Iterator[Any]) -> list[Tensor]:
    with gapless.AsyncReplicas(model, replicas=2, loss=F.mse_loss, optimizer=sgd, local_steps=2) as replicas:
        return [each.loss for each in replicas.run(loader)]


@pytest.mark.parametrize("trained", [streamed, replicated])
def test_asynchronous_training_has_batches_of_its_own(trained: Callable[..., list[Tensor]]) -> None:
    ours, fresh = model_of(), model_of()
    assert trained(ours, in_one_buffer()) == trained(fresh, anew())
    for one, other in zip(ours.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one, other)


def test_copies_are_laid_out_as_what_they_copy() -> None:
    x = torch.randn(6, 10)
    batch: dict[str, Any] = {
        "cut": x[:, 2:7],
        "turned": x.t(),
        "spread": x[:1].expand(4, 10),
        "sparse": x.to_sparse(),
        "n": 3,
    }
    batch["learns"] = x[1:].clone().requires_grad_()
    (made, same), as_it_was = own(batch, x[1:, 2:7]), copy.deepcopy({**batch, "learns": batch["learns"].detach()})
    x.zero_()
    made["cut"][1] = as_it_was["cut"][1] = 7.0
    as_it_was["turned"][2:7, 1] = 7.0
    assert torch.equal(same, made["cut"][1:])
    assert made.keys() == batch.keys()
    assert made["n"] == 3
    assert made["learns"].requires_grad
    for name, each in as_it_was.items():
        if name not in ("n", "sparse"):
            assert torch.equal(made[name], each), name
            assert made[name].stride() == batch[name].stride(), name
    assert torch.equal(made["sparse"].to_dense(), as_it_was["sparse"].to_dense())


def test_parts_of_a_data_set_are_copied_without_what_lies_between_them() -> None:
    data = torch.arange(2 * 1000 * 8).view(2, 1000, 8)
    batch = {"x": data[0, 8:16], "shifted": data[0, 9:17], "y": data[1, 8:16], "again": data[1, 8:16]}
    made, target = own(batch, data[1, 500:508])
    assert {name: each.tolist() for name, each in made.items()} == {name: each.tolist() for name, each in batch.items()}
    memories = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in (*made.values(), target)}
    assert sum(memories.values()) <= (9 + 8 + 8) * 8 * data.element_size() + 16
    made["x"][1] = made["y"][1] = 0
    assert not made["shifted"][0].any()
    assert not made["again"][1].any()
