"""The same config on the ranks of torchrun: the same bits, and a run that goes on after a rank was killed."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from gapless.checkpoint.listing import saved_in
from gapless.plan.plan import Plan
from gapless.train.config.config import read_config
from gapless.train.job import build
from gapless.train.run.metrics import read_metrics
from gapless.train.run.run_folder import RunFolder
from gapless.train.run.training import make_trainer, prepared
from gapless.train.torchrun import Ranks
from tests.cli.test_main import environment
from tests.programs import Program, Programs
from tests.run.crew import free_port
from tests.run.forked import Launch
from tests.train.configs import CONFIG, write

LONGER = (("steps = 6", "steps = 40"), ('["cpu", "cpu"]', '["cpu", "cpu", "cpu", "cpu"]'))
QUIET = ("run.tensorboard=false", "run.report=false", "checkpoint.every=2", "pipeline.threads=1")

_SET = tuple(word for setting in QUIET for word in ("--set", setting))


def launched(config: Path, ranks: int, *words: str, restarts: int = 0) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
            *("--max-restarts", str(restarts), "-m", "gapless", "train", str(config), *words),
            *_SET,
        ],
        env={**environment(), "OMP_NUM_THREADS": "1"},
        cwd=config.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def on_ranks(config: Path, ranks: int, *words: str) -> str:
    """What a run in the folder `ranks` prints, to its end."""
    with launched(config, ranks, "--folder", "ranks", *words) as process:
        out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    return out


def weights_and_losses(config: Path, folder: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Those of a run that has ended: loading its last checkpoint trains no step."""
    with prepared(read_config(config, QUIET), RunFolder(folder), Ranks()) as training:
        assert training.trainer.step == training.trainer.steps
        weights = {name: each.clone() for name, each in training.pipe.state_dict().items()}
    return weights, [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]


def assert_same(config: Path, one: Path, other: Path) -> None:
    (weights, losses), (again, found) = (weights_and_losses(config, each) for each in (one, other))
    assert losses == found
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def in_one_process(config: Path, folder: Path) -> None:
    with prepared(read_config(config, QUIET), RunFolder(folder), Ranks()) as training:
        training.run()


def test_two_ranks_train_as_one_process_does_bit_for_bit(tmp_path: Path, programs: Programs) -> None:
    """In the environment that torchrun makes; the slow tests start torchrun itself."""
    config = write(tmp_path)
    in_one_process(config, tmp_path / "one")
    words = ("gapless", "train", str(config), "--folder", "ranks", "--json", *_SET)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                programs.start(*words, cwd=tmp_path, environment={**common, "RANK": rank, "LOCAL_RANK": rank})
            )
            for rank in ("0", "1")
        ]
        first, second = (rank.ended(200.0) for rank in ranks)
    assert (first.code, second.code) == (0, 0), (first, second)
    assert json.loads(first.out)["ended"] == "all steps are done"
    assert second.out == ""
    assert_same(config, tmp_path / "one", tmp_path / "ranks")


def test_a_refusal_on_ranks_leaves_no_folder_and_the_timeout_of_the_config_holds(
    tmp_path: Path, programs: Programs
) -> None:
    """Rank 1 never gets as far as its pipeline. Nothing could shorten the ten minutes that rank 0 waited."""
    config = write(tmp_path, ("mine.py:make", "mine.py:late"))
    with (tmp_path / "mine.py").open("a") as mine:
        mine.write("\ndef late(**rest):\n    import os, time\n")
        mine.write("    time.sleep(600 if os.environ['RANK'] == '1' else 0)\n    return make(**rest)\n")
    common = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}

    def started(rank: str, port: str, *words: str) -> AbstractContextManager[Program]:
        environment = {**common, "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
        return programs.start("gapless", "train", str(config), *words, *_SET, cwd=tmp_path, environment=environment)

    port = free_port()
    words = ("--set", "pipeline.timeout=3")
    with started("0", port, *words) as first, started("1", port, *words) as second:
        told = first.ended(100.0)
        second.send_signal(signal.SIGKILL)
    assert told.code == 2, told
    assert "has waited 3 s for rank 1 to make the same pipeline" in told.err
    assert not (tmp_path / "runs").exists()
    port = free_port()
    others = ("--resume", "missing", "--set", "model.name=mine.py:make")
    with started("0", port, *others) as first, started("1", port, *others) as second:
        assert [rank.ended(100.0).code for rank in (first, second)] == [2, 2]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b", "interleaved"])
def test_four_ranks_train_as_one_process_does_bit_for_bit(tmp_path: Path, schedule: str) -> None:
    config = write(tmp_path, *LONGER, ("zb-h1", schedule), ("depth = 5", "depth = 9"))
    in_one_process(config, tmp_path / "one")
    on_ranks(config, 4)
    assert_same(config, tmp_path / "one", tmp_path / "ranks")


@pytest.mark.slow
def test_replicas_share_the_minibatches(tmp_path: Path) -> None:
    config = write(tmp_path, ("microbatches = 4", "microbatches = 2"), ("dropout = 0.25", "dropout = 0.0"))
    in_one_process(config, tmp_path / "one")
    on_ranks(config, 4)
    (_, losses), (_, found) = (weights_and_losses(config, tmp_path / each) for each in ("one", "ranks"))
    assert found == pytest.approx(losses, rel=1e-4)  # sums over replicas have another order


def plans(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    ranks = Ranks(dist.get_rank(), 2, 0, 1, mesh, dist.new_group(backend="gloo"))
    config = read_config(Path(folder) / "mine.toml").changed(plan="auto", microbatches=3)
    job = build(config, ranks)
    before = torch.get_rng_state()
    plan = job.made_plan(seconds=0.01)
    assert (plan.num_devices, plan.microbatches, plan.minibatch) == (2, 3, 6)
    assert len(set(ranks.gathered(plan.text()))) == 1
    assert torch.equal(before, torch.get_rng_state())
    assert job.fits(plan)
    assert not replace(job, ranks=Ranks(0, 4, 0, 2, mesh)).fits(plan)
    assert not replace(job, config=config.changed(devices=3)).fits(plan)
    with job.pipeline(plan) as pipe:
        trainer = make_trainer(config.changed(steps=2), job, pipe)
        trainer.run()
        assert (trainer.step, pipe.schedule) == (2, plan.schedule)


def test_ranks_make_one_plan_and_train_with_it(launch: Launch, tmp_path: Path) -> None:
    write(tmp_path)
    launch(plans, 2, str(tmp_path))


@pytest.mark.slow
def test_a_run_with_a_plan_goes_on_with_another_plan_on_other_devices_and_keeps_its_microbatches(
    tmp_path: Path,
) -> None:
    config = write(tmp_path)
    out = on_ranks(config, 2, "--plan", "auto", "--steps", "3")
    assert len(re.findall("^the plan takes the place of schedule, microbatches in", out, re.M)) == 1
    assert len(re.findall("^caution: 2 CPU ranks share the", out, re.M)) == 1
    kept = Plan.read(tmp_path / "ranks" / "plan.json")
    one = read_config(config, QUIET).changed(plan="auto")
    with prepared(one, RunFolder(tmp_path / "ranks"), Ranks()) as training:
        assert training.begun == 3
        assert training.plan is not None
        assert training.plan.microbatches == kept.microbatches
        training.run()
    in_one_process(write(tmp_path, ("microbatches = 4", f"microbatches = {kept.microbatches}")), tmp_path / "one")
    losses, found = (
        [line["loss"] for line in read_metrics(tmp_path / each / "metrics.jsonl") if "loss" in line]
        for each in ("one", "ranks")
    )
    assert losses == found


def ranks_of(agent: int) -> list[int]:
    """The processes that torchrun has started."""
    found = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return [int(each) for each in found if "gapless" in _command(int(each))]


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("seed", range(10))
def test_a_killed_rank_is_started_again_and_the_run_goes_on(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    config = write(tmp_path, *LONGER)
    in_one_process(config, tmp_path / "one")
    with launched(config, 4, "--folder", "ranks", restarts=3) as process:
        until = time.monotonic() + 200
        while (
            len(saved_in(tmp_path / "ranks" / "checkpoints") if (tmp_path / "ranks" / "checkpoints").is_dir() else ())
            < 2
        ):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.3))
        os.kill(chance.choice(ranks_of(process.pid)), signal.SIGKILL)
        out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    (gone_on,) = re.findall(r"run: ranks, resumed after step (\d+) of 40", out)
    assert int(gone_on) % 2 == 0
    assert int(gone_on) >= 2
    assert_same(config, tmp_path / "one", tmp_path / "ranks")


@pytest.mark.slow
def test_sigterm_to_torchrun_saves_on_all_ranks_and_the_run_goes_on(tmp_path: Path) -> None:
    config = write(tmp_path, ("steps = 6", "steps = 100000"))
    with launched(config, 2, "--folder", "ranks") as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("step "):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=200)
    latest = saved_in(tmp_path / "ranks" / "checkpoints")[-1].step
    last = [line for line in read_metrics(tmp_path / "ranks" / "metrics.jsonl") if "loss" in line][-1]["step"]
    assert latest == last, err


def test_a_number_of_ranks_that_makes_no_pipelines_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gapless.cli import main

    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    assert main(["train", str(write(tmp_path, text=CONFIG))]) == 2
    assert capsys.readouterr().err == (
        "gapless: torchrun started 3 ranks, but pipeline.devices is 2, one rank for each: start a multiple of 2 ranks, "
        "or --set pipeline.devices=3\n"
    )
