"""An optimizer step that does not wait has the bits of one that does, whatever is clipped or left out on the way."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import gapless
from tests.run.forked import Launch
from tests.run.overlap.plain_training import OPTIMIZERS, Run, differences, overlapped, plain


@pytest.mark.parametrize(("schedule", "optimizer"), zip(["1f1b", "zb-h2", "zb-v"], OPTIMIZERS, strict=True))
def test_training_has_the_bits_of_a_loop_that_waits(schedule: str, optimizer: str) -> None:
    run = Run(1, schedule=schedule, optimizer=optimizer, norms=True, bad=(5, 13), large=(3, 8, 9, 10, 16), read=(7,))
    assert differences(plain(run, 18), overlapped(run, 18)) == []


@pytest.mark.parametrize(("schedule", "parts"), [("zb-h2", 1), ("gpipe", 2), ("zb-v", 1)])
def test_a_scaler_has_the_bits_of_a_loop_that_waits(schedule: str, parts: int) -> None:
    """Gradients overflow at its first scales, again when it has grown, and in steps that are large anyway."""
    run = Run(9, schedule=schedule, norms=True, large=(12, 13, 20), bad=(17,), parts=parts, scale=2.0**127, read=(9,))
    wanted = plain(run, 24)
    assert 3 <= sum(not norm.isfinite() for norm in wanted.norms) <= 12
    assert differences(wanted, overlapped(run, 24)) == []


@pytest.mark.parametrize("around", [nullcontext, partial(torch.autocast, "cpu", torch.float16)])
def test_float16_autocast_has_the_bits_of_a_loop_that_waits(around: Callable[[], AbstractContextManager[Any]]) -> None:
    """Autocast around all steps keeps casts of weights, which an update makes wrong."""
    run = Run(10, schedule="zb-h2", large=(5, 6), scale=2.0**18, half=True)
    wanted = plain(run, 10)
    assert 2 <= sum(not norm.isfinite() for norm in wanted.norms) <= 7
    with around():
        found = overlapped(run, 10)
    assert differences(wanted, found) == []


@pytest.mark.parametrize("remat", ["stage", "layer"])
def test_a_step_is_made_again_from_a_checkpoint(remat: str, tmp_path: Path) -> None:
    """It has the number of the one before. That was refused, as if a forward had changed weights in between."""
    run = Run(12, schedule="zb-h2", remat=remat, scheduled=False)
    model = run.model()
    with gapless.Pipeline(model, devices=3, schedule="zb-h2", microbatches=4, loss=F.mse_loss, remat=remat) as pipe:  # type: ignore[arg-type]
        optimizer, _ = run.optimizer_of(pipe.parameters())
        training = pipe.training(optimizer, max_norm=run.max_norm)
        for step in (0, 1, 2, 3):
            if step == 3:
                pipe.save(tmp_path / "made", optimizer)
            training.step(*run.batch(step))
        pipe.load(tmp_path / "made", optimizer)
        for step in (3, 4, 5):
            training.step(*run.batch(step))
        found = copy.deepcopy(pipe.state_dict())
    [wanted] = plain(run, 6).states
    assert all(torch.equal(found[name], each) for name, each in wanted.items())


@pytest.mark.parametrize("seed", range(4))
def test_random_runs_have_the_bits_of_a_loop_that_waits(seed: int) -> None:
    run = Run.random(seed, 20)
    assert differences(plain(run, 20), overlapped(run, 20)) == [], run


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_many_random_runs_have_the_bits_of_a_loop_that_waits(seed: int) -> None:
    run = Run.random(seed, 200)
    assert differences(plain(run, 200), overlapped(run, 200)) == [], run


def ranks_train(first: str, last: str, steps: str, *names: str) -> None:
    """Random runs, one after another, on all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    for seed in range(int(first), int(last)):
        fixed = {"schedule": names[seed % len(names)], "scale": 2.0**127 if seed % 2 else None} if names else {}
        run = Run.random(seed, int(steps), devices=dist.get_world_size(), **fixed)
        assert differences(plain(run, int(steps)), overlapped(run, int(steps), mesh=mesh)) == [], run


def test_ranks_have_the_bits_of_a_loop_that_waits(launch: Launch) -> None:
    launch(ranks_train, 3, "0", "3", "16", "zb-h2", "zb-v", "1f1b")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(200, 230, 5))
def test_random_runs_on_ranks_have_the_bits_of_a_loop_that_waits(launch: Launch, first: int) -> None:
    launch(ranks_train, 4, str(first), str(first + 5), "200", timeout=600)
