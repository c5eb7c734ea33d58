"""The largest model with the host's memory: what is predicted, and the ranks that try it."""

from dataclasses import replace

import pytest

from benchmarks.gpipe.giants import transformer_profile
from benchmarks.gpipe.offload import drawn, run, trained
from benchmarks.peer.contest import Contest
from gapless.plan.plan import Plan
from gapless.plan.profile.machine import Device, Mesh
from gapless.plan.profile.profile import Host
from gapless.plan.search.search import search
from gapless.plan.search.search_options import SearchOptions

SMALL = {"devices": 4, "microbatches": 8, "samples": 1, "width": 512, "tokens": 512, "memory": 0.6}


@pytest.mark.slow
def test_every_way_takes_a_model_at_least_as_large_as_the_one_before() -> None:
    result = run(**SMALL, speed=1.0)  # type: ignore[arg-type]
    found, (table,) = result.found, result.tables
    layers = {row["way"]: row["layers"] for row in found["rows"]}
    assert 0 < layers["plain"] < layers["offload"] <= layers["both"] <= layers["optimizer"]
    assert layers["plain"] < layers["remat"] <= layers["both"]
    steps = {row["way"]: row["same"] for row in found["rows"]}
    assert steps["plain"] is None
    assert steps["optimizer"] <= steps["both"] <= steps["remat"]
    assert [row[0] for row in table.rows] == list(layers)
    assert drawn(found["rows"]).count("<rect") == 1 + len(layers)


@pytest.mark.parametrize("depth", [2, 3])
def test_ranks_train_what_is_planned_and_say_what_went_wrong(depth: int) -> None:
    contest = Contest(devices=2, microbatches=4, kind="linear", size=64, samples=2, tokens=16)  # on the CPU
    profile = replace(transformer_profile(2, 2, 64, 16), host=Host(1e9))
    wanted = SearchOptions(schedules=["1f1b"], microbatches=4, mesh=Mesh(1, 2), offload="both")
    plan: Plan = search(profile, [Device()] * 2, wanted, 8).best
    reason = trained(contest, depth, plan, 2**30)
    assert (not reason) if depth == 2 else "layers" in reason  # the plan is for two
