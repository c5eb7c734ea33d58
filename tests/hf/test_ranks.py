"""PipelineTrainer with a process for each device, against transformers.Trainer on one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.hf.training import arguments, equal, trained
from tests.model.hub import gpt2, hub
from tests.run.forked import Launch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, ["adamw", "sgd", "bf16", "remat"]),
        (4, ["adamw", "sgd", "evaluated", "bf16", "remat"]),
    ],
)
def test_ranks_leave_the_weights_and_logs_of_one_device(
    ranks: int, names: list[str], launch: Launch, tmp_path: Path
) -> None:
    from tests.hf import on_ranks

    for name in names:
        on_ranks.write_plain(str(tmp_path), name)
    launch(on_ranks.same_as_plain, ranks, str(tmp_path), *names, timeout=300.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.usefixtures("deterministic")
def test_ranks_on_a_gpu_leave_the_weights_and_logs_of_one_device(launch: Launch, tmp_path: Path) -> None:
    from tests.hf import on_ranks

    on_ranks.write_plain(str(tmp_path), "gpu")
    launch(on_ranks.same_as_plain, 2, str(tmp_path), "gpu", timeout=300.0)


def loaded(file: Path) -> Any:
    if file.suffix == ".safetensors":
        return load_file(file)
    if file.suffix == ".json":
        found = json.loads(file.read_text())
        for line in found.get("log_history", ()):
            for name in [name for name in line if name.endswith(("runtime", "per_second", "preparation_time"))]:
                del line[name]
        return {name: each for name, each in found.items() if "checkpoint" not in name}
    return torch.load(file, weights_only=False)


def same_files(ours: Path, theirs: Path) -> None:
    assert {each.name for each in ours.iterdir()} == {each.name for each in theirs.iterdir()}
    for file in ours.iterdir():
        if file.name in ("optimizer.pt", "scheduler.pt", "trainer_state.json") or file.suffix == ".safetensors":
            assert equal(loaded(file), loaded(theirs / file.name)), file.name
        elif file.name == "rng_state.pth":
            assert torch.equal(loaded(file)["cpu"], loaded(theirs / file.name)["cpu"])


def test_steps_logs_and_files_of_ranks_are_those_of_one_process_and_a_run_moves_between_them(
    launch: Launch, tmp_path: Path
) -> None:
    from tests.hf import on_ranks

    plain = on_ranks.write_plain(str(tmp_path), "evaluated", asked=on_ranks.SAVED)
    torch.save(plain.model.state_dict(), tmp_path / "plain.pt")
    launch(on_ranks.saving, 2, str(tmp_path), timeout=300.0)
    for folder in ("checkpoint-4", "checkpoint-5"):
        same_files(tmp_path / "ours" / folder, tmp_path / "plain evaluated" / folder)
    ours, theirs = (str(tmp_path / name / "checkpoint-4") for name in ("ours", "plain evaluated"))
    launch(on_ranks.resuming, 3, str(tmp_path), str(tmp_path / "plain.pt"), ours, theirs, timeout=300.0)
    rest = {**on_ranks.SAVED, "save_strategy": "no"}
    one, _ = on_ranks.train(hub().Trainer, tmp_path / "one", "adamw", asked=rest, resume=ours)
    assert all(map(torch.equal, one.model.parameters(), plain.model.parameters()))


@pytest.mark.slow
def test_adapters_the_best_model_and_dropout_are_those_of_one_process(launch: Launch, tmp_path: Path) -> None:
    from gapless.hf import PipelineTrainer
    from tests.hf import on_ranks

    on_ranks.lora(hub().Trainer, tmp_path / "plain lora").save_model(str(tmp_path / "plain adapter"))
    best = on_ranks.stopped_early(hub().Trainer, tmp_path / "plain best")
    args = arguments(tmp_path / "dropout", max_steps=6)
    more = {"schedule": "zb-v", "devices": 2, **on_ranks.OWN}
    dropped = trained(PipelineTrainer, gpt2(0.2), args, **more)[0]
    torch.save(dropped.model.state_dict(), tmp_path / "dropout.pt")
    launch(on_ranks.saving_more, 2, str(tmp_path), timeout=300.0)
    for folder in ("lora/checkpoint-4", "adapter"):
        same_files(tmp_path / f"our {folder}", tmp_path / f"plain {folder}")
    logs, weights = torch.load(tmp_path / "best.pt")
    assert [line["eval_loss"] for line in logs if "eval_loss" in line] == [
        line["eval_loss"] for line in best.state.log_history if "eval_loss" in line
    ]
    assert all(torch.equal(each, weights[name]) for name, each in best.model.named_parameters())
    assert [each.name for each in (tmp_path / "our best").iterdir()] == [
        each.name for each in (tmp_path / "plain best").iterdir()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["evaluated", "bf16"])
def test_two_pipelines_leave_the_weights_and_logs_of_trainer_on_two_devices(
    name: str, launch: Launch, tmp_path: Path
) -> None:
    """Trainer on two devices is DDP, which adds up the gradients of each in the same order."""
    from tests.hf import on_ranks

    launch(on_ranks.plain_replicas, 2, str(tmp_path), name, timeout=300.0)
    launch(on_ranks.replicas, 4, str(tmp_path), name, timeout=300.0)


@pytest.mark.slow
def test_other_losses_loaders_and_models_are_those_of_one_device_on_all_ranks(launch: Launch, tmp_path: Path) -> None:
    from tests.hf import on_ranks

    wanted = on_ranks.other_ways(hub().Trainer, tmp_path / "plain")
    launch(on_ranks.all_other_ways, 2, str(tmp_path), timeout=300.0)
    for rank in range(2):
        found = torch.load(tmp_path / f"ways {rank}.pt")
        assert all(map(equal, found, wanted)), [(a, b) for a, b in zip(found, wanted, strict=True) if not equal(a, b)]


@pytest.mark.slow
def test_torchrun_starts_killed_ranks_again_and_they_go_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    from tests.hf import on_ranks

    on_ranks.train(hub().Trainer, tmp_path / "plain", "adamw", asked=on_ranks.SAVED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "-m", "tests.hf.restarted", str(tmp_path / "ours")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    assert "rank 1 leaves at step 3" in ran.stdout
    weights = load_file(tmp_path / "ours" / "checkpoint-5" / "model.safetensors")
    wanted = load_file(tmp_path / "plain" / "checkpoint-5" / "model.safetensors")
    assert equal(weights, wanted)
