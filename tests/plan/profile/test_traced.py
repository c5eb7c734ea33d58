"""Plans for modules that are traced: made without layers=, known again, and run with the bits of the plain loop."""

from __future__ import annotations

import gc
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.errors import ConfigError, PlanError
from gapless.model.reference import Reference
from gapless.model.traced.capture import own_loss
from gapless.model.traced.graph_cuts import GraphCuts
from gapless.plan.plan import Plan
from gapless.plan.profile.measure import measure
from gapless.plan.profile.traced import Tracer
from gapless.zoo.transformer import transformer, translation_loss
from gapless.zoo.unet import unet
from tests.model.training import assert_exact, assert_same, assert_same_state

pytestmark = pytest.mark.usefixtures("traced_once")
TWO = ["cpu"] * 2


class Skips(nn.Module):
    """Skips, a tied head, dropout, and a loss of its own, in a dict."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = first = self.tokens(ids)
        for block in self.blocks:
            x = self.drop(torch.relu(block(x))) + first
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Whole(nn.Module):
    """Changes one tensor from its first line to its last, so it can't be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale
        return y.add_(x).mul_(self.scale)


def made(model: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    return model(**options)


def images(samples: int = 8) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 3, 8, 8, generator=chance), torch.randint(2, (samples, 8, 8), generator=chance)


def ids(samples: int = 8) -> Tensor:
    return torch.randint(1, 12, (samples, 5), generator=torch.Generator().manual_seed(samples))


def texts(samples: int = 8) -> dict[str, Tensor]:
    return {"ids": ids(samples), "labels": ids(samples)}


def small_unet() -> nn.Module:
    return made(unet, depth=1, width=4)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return small_unet()


@pytest.fixture(scope="module")
def plan(model: nn.Module) -> Plan:
    before = {name: (each, each.clone()) for name, each in model.state_dict(keep_vars=True).items()}
    modes = [module.training for module in model.modules()]
    found = planned(model, *images(), loss=F.cross_entropy)
    assert [module.training for module in model.modules()] == modes
    for name, each in model.state_dict(keep_vars=True).items():
        assert each is before[name][0]
        assert torch.equal(each, before[name][1])
        assert each.grad is None
    return found


def planned(model: nn.Module, *batch: Any, **options: Any) -> Plan:
    return gapless.make_plan(
        model, *batch, **{"devices": TWO, "schedules": ["zb-h1"], "microbatches": 4, "seconds": 0.01, **options}
    )


def assert_stages(pipe: gapless.Pipeline, plan: Plan) -> None:
    assert plan.cuts is not None
    parameters = dict(pipe.module().named_parameters(remove_duplicate=False))
    for stage, names in zip(pipe._staged.stages.values(), plan.cuts.parameters, strict=True):
        assert set(stage.parameters()) == {parameters[name] for name in names if name in parameters}


def test_a_plan_counts_pieces_of_the_graph_and_knows_where_it_cuts(model: nn.Module, plan: Plan) -> None:
    graph, _ = Tracer(model, torch.device("cpu"), 2).graph(images(2)[0])
    assert sum(plan.partition) == len(graph.layers)
    assert plan.cuts == graph.cuts(plan.partition)
    assert plan.cuts.num_nodes == len(graph.trace.nodes)
    assert [name for names in plan.cuts.parameters for name in names if "head" in name] == ["head.weight", "head.bias"]
    assert {"enter.conv1", "down.0.conv1", "up.0.conv1", "head"} <= set(graph.names)


def test_a_unet_runs_as_planned_also_with_a_smaller_last_batch(plan: Plan) -> None:
    assert_exact(small_unet(), [images(), images(3)], schedule=plan, microbatches=4, loss=F.cross_entropy)


def test_a_pipeline_that_evaluates_first_has_the_plans_stages_too(plan: Plan) -> None:
    """In eval mode a batch norm does not count, so the graph is another one."""
    model = small_unet()
    with gapless.Pipeline(model, devices=TWO, schedule=plan, loss=F.cross_entropy) as pipe:
        pipe.evaluate(*images())
        assert_stages(pipe, plan)
        pipe.step(*images())
        assert_stages(pipe, plan)


def test_what_was_measured_is_let_go_of_at_once() -> None:
    """A stage and a piece of a graph once held each other, and GPU memory with them, until Python collected them."""
    graph, inputs = Tracer(made(Skips), torch.device("cpu"), 2).graph(texts())
    gc.collect()
    gc.disable()
    try:
        before = sum(type(each) is nn.Parameter for each in gc.get_objects())
        measure(graph.layers, inputs, loss=own_loss, seconds=0.01)
        assert sum(type(each) is nn.Parameter for each in gc.get_objects()) == before
    finally:
        gc.enable()


def test_it_is_written_and_read_as_it_was(plan: Plan, tmp_path: Path) -> None:
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan
    assert "cuts" not in replace(plan, cuts=None).to_json()


@pytest.mark.slow
def test_an_encoder_and_decoder_runs_as_planned() -> None:
    model = made(transformer, vocab=12, width=8, depth=1, heads=2)
    found = planned(model, (ids(), ids()), ids(), loss=translation_loss, schedules=["1f1b"])
    batches = [((ids(), ids()), ids())] * 2
    assert_exact(model, batches, schedule=found, microbatches=4, loss=translation_loss, evaluate=False)


@pytest.fixture(scope="module")
def skips_plan() -> Plan:
    return planned(made(Skips), texts())


def test_a_batch_that_is_a_dict_brings_the_models_own_loss(skips_plan: Plan) -> None:
    assert skips_plan.cuts is not None
    assert all("head.weight" in names for names in skips_plan.cuts.parameters)  # which is that of the tokens
    model, plain = made(Skips), made(Skips)
    reference = Reference(plain)
    with gapless.Pipeline(model, devices=TWO, schedule=skips_plan, seed=5) as pipe:
        for step in range(2):
            result, wanted = pipe.step(texts()), reference.step(texts(), microbatches=4, seed=5, step=step)
            assert_same(result.losses, wanted.losses, f"losses of step {step}")
            assert_same_state(model, plain, f"step {step}")


def test_without_any_loss_there_is_no_plan() -> None:
    with pytest.raises(ConfigError, match="returned a Tensor without a loss, and no loss= was given"):
        planned(Whole(), torch.randn(8, 4))


def test_a_limit_leads_to_a_recompute_or_to_a_refusal() -> None:
    model, batch = made(Skips, depth=2), texts(32)
    tight = planned(model, batch, schedules=["gpipe"], memory=32_000)  # a pipeline has 48,000 without
    assert "stage" in tight.remat or tight.num_devices == 1
    assert "layer" not in tight.remat  # a piece of a graph is one layer to its stage
    assert max(held.total for held in tight.memory) <= 32_000
    with pytest.raises(PlanError, match=r"layer 0 \(0\.tokens\) alone needs 1\.504 KiB"):
        planned(model, batch, memory=1_000)


def test_a_model_without_a_place_to_cut_is_for_one_device() -> None:
    batch = (torch.randn(8, 4), torch.randn(8, 4))
    found = planned(Whole(), *batch, loss=F.mse_loss, schedules=["1f1b"])
    assert (found.partition, found.cuts) == ((1,), GraphCuts((), 3, (("scale",),)))
    assert (found.num_devices, found.idle_devices) == (1, 1)


def test_a_model_without_data_can_be_planned() -> None:
    with torch.device("meta"):
        model = Skips()
        model.head.weight = model.tokens.weight
    found = planned(model, texts())
    assert all(parameter.is_meta for parameter in model.parameters())
    assert found.cuts is not None


def test_another_model_is_refused(plan: Plan) -> None:
    message = (
        "another model: this UNet lacks 26 of the parameters and buffers, such as down.0.conv1.weight; make a plan"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        gapless.Pipeline(made(unet, depth=0, width=4), devices=TWO, schedule=plan, loss=F.cross_entropy)
    message = "the plan cuts a traced graph of 28 nodes, but this Sequential is cut between its layers: make a plan"
    with pytest.raises(ConfigError, match=message):
        gapless.Pipeline(nn.Sequential(nn.Linear(2, 2)), devices=TWO, schedule=plan, loss=F.cross_entropy)


def test_a_model_that_turns_out_to_be_larger_is_refused(skips_plan: Plan) -> None:
    with (
        gapless.Pipeline(made(Skips, depth=4), devices=TWO, schedule=skips_plan) as pipe,
        pytest.raises(ConfigError, match=r"this Skips uses 2 parameters more, such as blocks\.3\.weight; make a plan"),
    ):
        pipe.step(texts())


def test_a_plan_of_layers_is_refused_for_a_traced_module(plan: Plan) -> None:
    counted = replace(plan, cuts=None)
    with pytest.raises(ConfigError, match=rf"counts {sum(plan.partition)} layers of a sequence, but this UNet is trac"):
        gapless.Pipeline(small_unet(), devices=TWO, schedule=counted, loss=F.cross_entropy)


@pytest.mark.parametrize(
    "cuts",
    [
        {"after": [1, 2], "nodes": 26, "parameters": [[], []]},
        {"after": [30], "nodes": 26, "parameters": [[], []]},
        {"after": [3], "nodes": 26, "parameters": [[]]},
    ],
)
def test_cuts_that_make_other_stages_are_no_plan(plan: Plan, cuts: Any) -> None:
    data = json.loads(json.dumps(plan.to_json())) | {"cuts": cuts}
    with pytest.raises(ConfigError, match=r"this is not a plan: the plan has \d stages, but cuts a graph of 26 nodes"):
        Plan.from_json(data)


def test_a_model_that_is_no_sequence_is_measured_in_pieces(model: nn.Module) -> None:
    inputs, target = images(4)
    profile = measure(model, inputs, target, loss=F.cross_entropy, seconds=0.01)
    assert profile.samples == 4
    assert len(profile.layers) > 1
    weights = sum(each.numel() * each.element_size() for each in model.state_dict().values())
    assert sum(layer.parameters for layer in profile.layers) == pytest.approx(weights, rel=0.01)
    assert all(layer.forward.median > 0 for layer in profile.layers)
