"""A traced module, with a parameter that several ranks share: the bits of the plain loop."""

import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import gapless
from gapless.errors import ConfigError
from gapless.model.reference import Reference
from gapless.plan.plan import Plan
from tests.pipelines import SEED, assert_same, tokens
from tests.run.forked import Launch
from tests.run.ranks.test_many_processes import TiedGpt, line, logits_loss
from tests.traced_once import Traces

TRACES = Traces()


@functools.cache
def before_ranks() -> None:
    TRACES.trace(TiedGpt(), tokens(2)[0])


def captured_models(file: str) -> None:
    TRACES.use()
    mesh, plan = line(), Plan.read(file)
    torch.manual_seed(2)
    _captured(mesh, TiedGpt(), [tokens(8) for _ in range(3)], "zb-h1")
    pipe = _captured(mesh, TiedGpt(), [tokens(8)], plan)
    assert plan.cuts is not None
    rank = dist.get_rank()
    held = {name for name, _ in pipe.named_parameters()} - {"embedding.weight"}
    assert held == set(plan.cuts.parameters[rank]) - {"head.weight"}
    other = replace(plan, cuts=replace(plan.cuts, after=(plan.cuts.after[0] + rank,)))
    with pytest.raises(ConfigError, match="cuts"):
        gapless.Pipeline(TiedGpt(), mesh=mesh, loss=logits_loss, schedule=other)


def _captured(mesh: DeviceMesh, model: nn.Module, data: Any, schedule: str | Plan) -> gapless.Pipeline:
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
    return pipe


def test_ranks_have_the_bits_of_the_plain_loop_and_cut_a_traced_model_where_the_plan_says(
    tmp_path: Path, launch: Launch
) -> None:
    options: dict[str, Any] = {"schedules": ["1f1b"], "microbatches": 4, "flops": 1e7}
    plan = gapless.make_plan(TiedGpt(), *tokens(8), devices=["cpu"] * 2, loss=logits_loss, **options)
    plan.write(tmp_path / "plan.json")
    launch(captured_models, 2, str(tmp_path / "plan.json"))
