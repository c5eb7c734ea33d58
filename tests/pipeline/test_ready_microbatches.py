"""Microbatches that the caller has made, each with shapes of its own: the bits of a plain loop over them."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gapless
from gapless.errors import ConfigError
from tests.pipelines import assert_same
from tests.run.forked import Launch

LENGTHS = (5, 3, 7, 2)
VOCAB = 11


def reader() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(VOCAB, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, VOCAB))


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def counted(target: Tensor) -> Tensor:
    return (target != -100).sum()


def sentences(seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Of one length within a microbatch; the last words of some do not count."""
    torch.manual_seed(seed)
    ids = [torch.randint(VOCAB, (2 + m, length)) for m, length in enumerate(LENGTHS)]
    targets = [each.roll(-1, 1) for each in ids]
    for target in targets[1:]:
        target[0, -1] = -100
    return ids, targets


def by_hand(model: nn.Sequential, ids: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
    """The loop that a user writes."""
    total = sum(int(counted(target)) for target in targets)
    losses = []
    for part, target in zip(ids, targets, strict=True):
        losses.append(loss(model(part), target))
        (losses[-1] * (int(counted(target)) / total)).backward()
    return [each.detach() for each in losses]


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(("schedule", "partition"), [("1f1b", None), ("zb-v", [1, 1, 1, 1])])
def test_each_has_its_own_shapes_and_the_plain_gradient(schedule: str, partition: list[int] | None) -> None:
    model = reader()
    options: dict[str, Any] = {"loss": loss, "loss_weight": counted}
    plain, reference = copy.deepcopy(model), copy.deepcopy(model)
    with gapless.Pipeline(
        model, devices=2, schedule=schedule, microbatches=4, partition=partition, intra_op_threads=1, **options
    ) as pipe:
        for count in (4, 3):  # the last minibatch of an epoch may have fewer
            ids, targets = (each[:count] for each in sentences(count))
            result = pipe.step(ids, targets, cut=False, outputs=True)
            losses = by_hand(plain, ids, targets)
            told = gapless.plain_step(reference, ids, targets, microbatches=4, cut=False, **options)
            assert_same(result.losses, losses, "losses")
            assert_same(told.losses, losses, "losses of plain_step")
            assert [output.shape for output in result.outputs] == [(*part.shape, VOCAB) for part in ids]
            assert_same(result.outputs, told.outputs, "outputs")
            assert_same(grads(model), grads(plain), "gradients")
            assert_same(grads(reference), grads(plain), "gradients of plain_step")
        evaluated = pipe.evaluate(ids, targets, cut=False)
        assert_same(evaluated.outputs, [model(part).detach() for part in ids], "evaluated")
        numbers = [int(counted(target)) for target in targets]
        assert evaluated.weights == tuple(number / sum(numbers) for number in numbers)


def test_torch_s_loss_counts_the_targets_of_each() -> None:
    """One microbatch without -100 came first, and all were weighed by samples."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    rows = [torch.randn(n, 4) for n in (2, 3)]
    targets = [torch.tensor([0, 1]), torch.tensor([2, -100, -100])]
    with gapless.Pipeline(model, devices=2, microbatches=2, loss=F.cross_entropy) as pipe:
        result = pipe.step(rows, targets, cut=False)
    assert result.weights == (2 / 3, 1 / 3)


def test_a_traced_model_counts_its_own_labels() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = reader()

        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": loss(self.body(ids), labels)}

    torch.manual_seed(4)
    model = Own()
    plain = copy.deepcopy(model)
    ids, targets = sentences()
    with gapless.Pipeline(model, devices=2, microbatches=4, intra_op_threads=1) as pipe:
        result = pipe.step([{"ids": part, "labels": y} for part, y in zip(ids, targets, strict=True)], cut=False)
    assert_same(result.losses, by_hand(plain.body, ids, targets), "losses")
    assert_same(grads(model), grads(plain), "gradients")


@pytest.mark.parametrize(
    ("inputs", "target", "message"),
    [
        (torch.zeros(2, 3), None, "with cut=False inputs is a list of microbatches, but it is a Tensor"),
        ([torch.zeros(2, 3)], torch.zeros(2), "with cut=False target is a list of microbatches, but it is a Tensor"),
        ([torch.zeros(1, 3)] * 3, None, "3 microbatches were given, but there must be 1 to 2: make the pipeline with"),
        ([], None, "0 microbatches were given, but there must be 1 to 2"),
        (
            [torch.zeros(1, 3)] * 2,
            [torch.zeros(1)],
            "the number of microbatches is 2, and of targets 1: give one for each",
        ),
        ([torch.zeros(1, 3), torch.zeros(0, 3)], None, r"microbatch 1 is empty \(0 samples\): leave it out"),
    ],
)
def test_what_is_no_list_of_microbatches_is_refused(inputs: Any, target: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    with (
        gapless.Pipeline(model, devices=2, microbatches=2, loss=F.mse_loss) as pipe,
        pytest.raises(ConfigError, match=message),
    ):
        pipe.step(inputs, target, cut=False)


def on_ranks() -> None:
    mesh, model = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), reader()
    plain = copy.deepcopy(model)
    with gapless.Pipeline(model, mesh=mesh, microbatches=4, loss=loss, loss_weight=counted, intra_op_threads=1) as pipe:
        result = pipe.step(*sentences(), cut=False)
        assert_same(result.losses, by_hand(plain, *sentences()), "losses")
        mine = {name: each.grad for name, each in pipe.named_parameters() if each.grad is not None}
    wanted = grads(plain)
    assert_same(mine, {name: wanted[name] for name in mine}, "gradients")
    assert mine


def test_ranks_take_them_too(launch: Launch) -> None:
    launch(on_ranks, 2)
