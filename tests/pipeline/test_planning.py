"""Links between ranks as measured, and plans that all ranks of a mesh share."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gapless
from gapless.errors import ConfigError, GaplessError
from gapless.pipeline.planning import levels
from gapless.plan.profile.profile import Link
from gapless.run.ranks import link_speed
from gapless.run.ranks.link_speed import Hop
from tests.run.forked import Launch

NEAR, SLOW, FAR = Hop(1e-5, 1e10, True), Hop(2e-5, 5e9, True), Hop(1e-3, 1e8, False)


@pytest.mark.parametrize(
    ("hops", "expected"),
    [
        ([], ()),
        ([NEAR, SLOW], (Link("one host", None, 2e-5, 5e9),)),
        ([NEAR, FAR, SLOW], (Link("one host", 2, 2e-5, 5e9), Link("between hosts", None, 1e-3, 1e8))),
        ([FAR, FAR], (Link("between hosts", None, 1e-3, 1e8),)),
        # Three devices on one host and one on the other, or four and two: no groups of one size.
        ([NEAR, NEAR, FAR], (Link("the slowest hop", None, 1e-3, 1e8),)),
        ([NEAR, NEAR, NEAR, FAR, NEAR], (Link("the slowest hop", None, 1e-3, 1e8),)),
    ],
)
def test_hops_make_levels(hops: list[Hop], expected: tuple[Link, ...]) -> None:
    assert levels(hops) == expected


def test_every_rank_learns_the_same_links_and_gets_the_same_plan(launch: Launch) -> None:
    launch(links_and_plans, 4)


def test_a_plan_that_fails_on_the_first_rank_fails_on_all(launch: Launch) -> None:
    launch(too_large_for_all, 2)


# -- on every rank ----------------------------------------------------------------------------------------------------


def links_and_plans() -> None:
    link_speed._MOST = 1 << 20  # it is not about the speed
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    (link,) = links = gapless.measure_links(line)
    assert _same_everywhere(links)
    assert link.devices is None
    assert link.latency > 0
    assert link.bandwidth is not None
    assert link.bandwidth > 0
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    assert len(gapless.measure_links(square)) == 1
    cube = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    assert len(gapless.measure_links(cube["dp", "pp"])) == 1  # of each plane its own
    with pytest.raises(ConfigError, match=r"a device of this mesh has several ranks \(tp\)"):
        gapless.measure_links(cube)
    with pytest.raises(ConfigError, match="both are given"):
        gapless.make_plan(_model(), torch.zeros(4, 8), devices=2, mesh=line)

    torch.manual_seed(0)
    x, y = torch.randn(16, 8), torch.randn(16, 8)
    for mesh, shape in ((line, (1, 4)), (square, (2, 2))):
        model = _model()
        plain = copy.deepcopy(model)
        asked: dict[str, Any] = {"schedules": ["1f1b", "zb-h1"], "microbatches": 4, "seconds": 0.005}
        plan = gapless.make_plan(model, x, y, mesh=mesh, loss=F.mse_loss, **asked)
        assert _same_everywhere(plan.to_json())
        assert (plan.mesh.replicas, plan.num_devices) == shape
        assert plan.caution.startswith("4 CPU ranks share the ")
        assert "may differ from the prediction by more than 10%" in plan.caution
        assert plan.microbatches * plan.samples == 16
        with gapless.Pipeline(model, mesh=mesh, schedule=plan, loss=F.mse_loss) as pipe:
            loss = pipe.step(x, y).loss
        if mesh is line:
            plain_loss = gapless.plain_step(list(plain), x, y, loss=F.mse_loss, microbatches=plan.microbatches).loss
            assert loss is not None
            assert torch.equal(loss, plain_loss)
    free = gapless.make_plan(
        _model(),
        x,
        y,
        mesh=line,
        replicas=True,
        links=links,
        loss=F.mse_loss,
        schedules=["1f1b"],
        microbatches=4,
        flops=1e4,  # so slow that every rank is needed
    )
    assert free.mesh.replicas * free.num_devices == 4


def too_large_for_all() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    x = torch.zeros(4, 8)
    with pytest.raises(GaplessError, match="alone needs"):
        gapless.make_plan(_model(), x, x, mesh=mesh, loss=F.mse_loss, memory=512, microbatches=2, seconds=0.005)


def _model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(4)))


def _same_everywhere(value: object) -> bool:
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return all(each == value for each in found)
