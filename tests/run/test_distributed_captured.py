"""A traced module, with a parameter that several ranks share: the bits of the plain loop."""

import copy
from typing import Any

import torch
import torch._dynamo  # what tracing needs, once for all ranks
import torch.export
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import gapless
from gapless.model.plain import Reference
from tests.pipelines import SEED, assert_same, tokens
from tests.run.forked import launch
from tests.run.test_distributed import TiedGpt, line, logits_loss


def captured_models() -> None:
    mesh = line()
    torch.manual_seed(2)
    data = [tokens(8) for _ in range(3)]
    for schedule in ("1f1b", "zb-h1"):
        _captured(mesh, TiedGpt(), data, schedule)


def _captured(mesh: DeviceMesh, model: nn.Module, data: Any, schedule: str) -> None:
    reference = copy.deepcopy(model)
    plain_loop = Reference(reference)
    with gapless.Pipeline(
        model, mesh=mesh, loss=logits_loss, microbatches=4, seed=SEED, schedule=schedule, tied="exact"
    ) as pipe:
        for number, (inputs, target) in enumerate(data):
            ours = pipe.step(inputs, target)
            plain = plain_loop.step(inputs, target, loss=logits_loss, microbatches=4, seed=SEED, step=number)
            assert_same(ours.loss, plain.loss, f"captured, step {number}, loss")
            names = dict(reference.named_parameters())
            for name, parameter in pipe.named_parameters():
                assert_same(parameter.grad, names[name].grad, f"captured, step {number}, {name}")
        assert len(list(pipe.named_parameters())) < len(list(model.parameters()))


def test_captured_models_give_the_bits_of_the_plain_loop() -> None:
    launch(captured_models, 2)
