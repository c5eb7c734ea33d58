"""From a model to a plan, and from a plan to a pipeline with the gradients of the plain loop."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gapless
from gapless.errors import ConfigError, PlanError
from gapless.plan.plan import Plan
from gapless.plan.planner import _merged, planned
from gapless.plan.profile.machine import Mesh
from gapless.plan.search.search import search
from gapless.plan.search.search_options import SearchOptions
from gapless.zoo.emulated import Emulated
from tests.pipelines import Own, assert_same_gradients
from tests.plan import profiles

WIDTH, SAMPLES = 8, 8


def model() -> nn.Sequential:
    torch.manual_seed(0)
    wide = (8, 8, 8, 8, 8, 512)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, inner), nn.Tanh(), nn.Linear(inner, WIDTH)) for inner in wide)
    )


def batch(samples: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(1)
    return torch.randn(samples, WIDTH, generator=chance), torch.randn(samples, WIDTH, generator=chance)


def made(planned: Any = None, *given: Any, **more: Any) -> Plan:
    """A plan of the model, or of another, for two devices."""
    asked: dict[str, Any] = {"devices": ["cpu"] * 2, "loss": F.mse_loss, "seconds": 0.01, **more}
    return gapless.make_plan(planned or model(), *(given or batch()), **asked)


@pytest.fixture(scope="module")
def plan() -> Plan:
    # So small a model is quicker on one device, so a pipeline of both is asked for.
    wanted = SearchOptions(microbatches=4, schedules=["zb-h1"], mesh=Mesh(1, 2))
    return planned(
        model(),
        *batch(),
        devices=["cpu"] * 2,
        loss=F.mse_loss,
        wanted=wanted,
        memory="64MiB",
        slots=lambda largest: 1000 * largest,
        seconds=0.01,
    ).found.best


def test_a_plan_is_for_these_devices_and_this_minibatch(plan: Plan) -> None:
    assert (plan.recipe, plan.num_devices, plan.microbatches, plan.samples) == ("zb-h1", 2, 4, 2)
    assert plan.mesh == Mesh(1, 2)
    assert sum(plan.partition) == 6
    assert plan.limits == (64 * 2**20,) * 2
    assert plan.step_seconds > 0
    assert [held.reserved for held in plan.memory] == [1000 * 4 * 2 * WIDTH] * 2  # what messages of 2 samples keep
    assert plan.memory[0].parameters + plan.memory[1].parameters == sum(4 * p.numel() for p in model().parameters())


@pytest.mark.parametrize("samples", [SAMPLES, 3], ids=["whole", "a smaller last batch"])
def test_a_pipeline_takes_it_as_it_is(plan: Plan, samples: int) -> None:
    ours, plain = model(), model()
    x, y = batch(samples)
    with gapless.Pipeline(ours, devices=["cpu"] * 2, schedule=plan, loss=F.mse_loss) as pipe:
        assert (pipe.partition, pipe.microbatches) == (plan.partition, 4)
        assert pipe.schedule == plan.schedule
        loss = pipe.step(x, y).loss
    gapless.plain_step(plain, x, y, microbatches=4, loss=F.mse_loss)
    assert loss is not None
    assert_same_gradients(ours, plain)


def test_what_a_plan_says_need_not_be_said_again_but_may_be(plan: Plan) -> None:
    gapless.Pipeline(
        model(), devices=2, schedule=plan, microbatches=4, partition=list(plan.partition), loss=F.mse_loss
    ).close()


def test_another_number_of_devices_is_refused(plan: Plan) -> None:
    with pytest.raises(ConfigError, match=r"the plan is for 1 pipeline of 2 devices, but there is 1 pipeline of 3"):
        gapless.Pipeline(model(), devices=["cpu"] * 3, schedule=plan, loss=F.mse_loss)
    side_by_side = replace(plan, mesh=Mesh(2, 2))
    with pytest.raises(ConfigError, match=r"the plan is for 2 pipelines of 2 devices, but there is 1 pipeline of 2"):
        gapless.Pipeline(model(), devices=["cpu"] * 2, schedule=side_by_side, loss=F.mse_loss)


def test_all_that_differs_from_the_plan_is_refused_at_once(plan: Plan) -> None:
    with pytest.raises(ConfigError) as error:
        gapless.Pipeline(
            model(),
            devices=["cpu"] * 2,
            schedule=plan,
            microbatches=3,
            remat="stage",
            costs=gapless.Costs(),
            loss=F.mse_loss,
        )
    assert str(error.value) == (
        "microbatches is 3, but the plan has 4; remat is 'stage', but the plan has ['none', 'none']; costs are not "
        "those of the plan: leave these out, or make another plan"
    )


def test_several_sizes_of_microbatches_are_tried_and_the_best_is_measured() -> None:
    lines: list[str] = []
    found = made(schedules=["1f1b"], progress=lines.append)
    measured = {int(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("measuring")}
    assert measured >= {1, 2}  # to begin with: 4 microbatches per device, and twice the samples
    assert found.minibatch == SAMPLES


def test_the_gap_of_several_sizes_is_that_of_the_least_bound() -> None:
    # Microbatches of 2 were searched to the end, those of 8 were not: one of them may yet be the best.
    two, eight = (profiles.even(8).scaled(samples) for samples in (2, 8))
    wanted = SearchOptions(schedules=["1f1b"], mesh=Mesh(1, 2), microbatches=8)
    whole, part = search(two, 2, wanted, 16), search(eight, 2, replace(wanted, microbatches=2), 16)
    part = replace(part, searched=replace(part.searched, gap=0.5, untried=3, complete=False))
    found = _merged({2: two, 8: eight}, {2: whole, 8: part}).found
    assert found.best.step_seconds == whole.best.step_seconds
    assert found.best.step_seconds * (1 - found.searched.gap) == pytest.approx(0.5 * part.best.step_seconds)


def test_sizes_that_each_found_plans_of_the_other_only_still_give_one() -> None:
    # Measured with 2 samples the best have 8, and the other way round; a search does not list them all.
    two, eight = (profiles.even(8).scaled(samples) for samples in (2, 8))
    wanted = SearchOptions(schedules=["1f1b"], mesh=Mesh(1, 2), microbatches=2)
    of_two, of_eight = search(two, 2, wanted, 16), search(eight, 2, replace(wanted, microbatches=8), 16)
    assert (of_two.best.samples, of_eight.best.samples) == (8, 2)
    found = _merged({2: two, 8: eight}, {2: of_two, 8: of_eight}).found
    assert found.best in (replace(each.best, searched=found.searched) for each in (of_two, of_eight))


def test_a_plan_for_fewer_devices_than_there_are_runs_on_those() -> None:
    found = made(schedules=["1f1b"], microbatches=2)
    fewer = replace(found, mesh=replace(found.mesh, order=(1,))) if found.num_devices == 1 else found
    assert fewer.searched is not None
    assert fewer.searched.devices == 2
    assert "searched" in fewer.to_json()
    ours, plain = model(), model()
    with gapless.Pipeline(ours, devices=["cpu"] * 2, schedule=fewer, loss=F.mse_loss) as pipe:
        assert len(pipe.devices) == found.num_devices
        pipe.step(*batch())
    gapless.plain_step(plain, *batch(), microbatches=2, loss=F.mse_loss)
    assert_same_gradients(ours, plain)


@pytest.mark.slow
@pytest.mark.alone
def test_where_time_does_not_grow_with_the_samples_microbatches_are_large() -> None:
    layers = [Emulated(forward=2e-3, input_grad=2e-3, weight_grad=2e-3) for _ in range(4)]
    x = torch.zeros(8, 1, requires_grad=True)
    found = made(layers, x, x, loss=lambda y, _: y.sum(), schedules=["1f1b"], seconds=0.02)
    # Each microbatch takes as long, whatever is in it: one of all samples is best, and another device gains nothing.
    assert (found.microbatches, found.samples) == (1, 8)
    assert found.step_seconds == pytest.approx(4 * 6e-3, rel=0.25)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"devices": "cpu"}, "devices is 'cpu', but it must say how many"),
        ({"devices": ["cpu", "cuda:7"]}, "device cuda:7 does not exist: this machine has"),
        ({"devices": ["gpu:0"]}, "device 'gpu:0' is neither cpu nor cuda"),
        ({"seconds": float("nan")}, "seconds is nan, but it must be a number of at least 0"),
        ({"slack": -1.0}, "slack is -1.0, but it must be a number of at least 0"),
        ({"devices": 0}, "devices is 0, but it must be a whole number of at least 1"),
        ({"memory": ["1GiB"]}, "memory lists 1 device, but there are 2"),
        ({"memory": "24 GiBi"}, "memory is '24 GiBi', but it must be a number of bytes"),
    ],
)
def test_what_makes_no_sense_is_said(more: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(**more)


def test_devices_are_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="devices are cpu, cuda, but a plan is for one kind"):
        made(devices=["cpu", "cuda:0"])


def test_a_missing_target_is_said() -> None:
    with pytest.raises(ConfigError, match="no target was given, and the loss failed without one"):
        made(model(), batch()[0])


def test_layers_of_a_module_may_be_given() -> None:
    parts = model()
    whole, layers = Own(lambda whole, x: whole.parts(x), parts=parts), list(parts)
    found = made(whole, layers=layers, loss=None, schedules=["1f1b"], microbatches=4)
    assert (sum(found.partition), found.cuts) == (6, None)
    with gapless.Pipeline(whole, devices=["cpu"] * 2, schedule=found, layers=layers, loss=F.mse_loss) as pipe:
        pipe.step(*batch())


def test_what_fits_nowhere_is_said_with_its_sizes() -> None:
    with pytest.raises(PlanError, match="layer 5"):
        made(memory=60_000)
