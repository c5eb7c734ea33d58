"""`gapless train` with an optimizer step that does not wait: the numbers of a loop that waits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gapless.errors import ConfigError
from gapless.train.config.config import Config, read_config
from gapless.train.job import build
from gapless.train.run.run_folder import RunFolder
from gapless.train.run.trainer import NotFiniteError
from gapless.train.run.training import make_trainer, prepared
from gapless.train.torchrun import Ranks
from tests.train.configs import Kept, write

SETTINGS = (
    *("model.arguments.dropout=0.0", "data.arguments.count=100", "pipeline.threads=1", "pipeline.schedule=zb-h2"),
    *(
        "scheduler.name=StepLR",
        "scheduler.arguments={ step_size = 3, gamma = 0.5 }",
        "train.accumulate=2",
        "train.steps=8",
        "train.clip=0.32",
    ),
    *("evaluate.every=3", "evaluate.name=mine.py:batches", "checkpoint.every=3", "run.tensorboard=false"),
    *("run.timeline=4", "run.report=true"),
)
NAMES = ("loss", "rate", "norm", "evaluation", "saved", "skipped", "ended")


def plainly(folder: Path) -> tuple[nn.Module, list[tuple[float, float, float]]]:
    """As anybody would write it: microbatches of 2, 2, 1 and 1 samples, two minibatches in an update."""
    space: dict[str, Any] = {}
    exec((folder / "mine.py").read_text(), space)
    torch.manual_seed(7)
    model = space["make"](depth=5)
    batches = space["batches"](6, 7, count=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    told = []
    for _ in range(8):
        total = 0.0
        for _ in range(2):
            x, y = next(batches)
            parts = list(zip(x.split([2, 2, 1, 1]), y.split([2, 2, 1, 1]), strict=True))
            losses = [F.cross_entropy(model(a), b) * (len(a) / 12) for a, b in parts]
            for loss in losses:
                loss.backward()
            total += float(losses[0].detach() + losses[1].detach() + losses[2].detach() + losses[3].detach())
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.32))
        told.append((total, optimizer.param_groups[0]["lr"], norm))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model, told


def run(config: Config, folder: Path, stop: int = 0) -> tuple[bool, list[torch.Tensor]]:
    """Whether steps overlapped, and the weights. Ends after step `stop` as Ctrl-C would end it."""

    class Stops(Kept):
        def on_step(self, trainer: Any, step: Any) -> None:
            if step.number == stop:
                trainer.stop("Ctrl-C")

    with prepared(config, RunFolder(folder), Ranks()) as training:
        training.add(Stops())
        training.run()
        return training.trainer.training is not None, [each.detach().clone() for each in training.pipe.parameters()]


def lines(folder: Path) -> list[dict[str, Any]]:
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{"step": each["step"], **{name: each[name] for name in NAMES if name in each}} for each in found]


@pytest.mark.parametrize("stop", [0, 4])
def test_a_run_has_the_bits_of_a_plain_loop_and_the_files_of_a_run_that_waits(tmp_path: Path, stop: int) -> None:
    """With clipping, a scheduler, accumulation, evaluations and checkpoints; and resumed in the middle."""
    file = write(tmp_path)
    for name, overlap in (("waits", "false"), ("overlaps", "auto")):
        config = read_config(file, [*SETTINGS, f"pipeline.overlap={overlap}"])
        if stop:
            run(config, tmp_path / name, stop)
        overlapped, weights = run(config, tmp_path / name)
        assert overlapped == (name == "overlaps")
        model, told = plainly(tmp_path)
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
        steps = [each for each in lines(tmp_path / name) if "loss" in each]
        assert [(each["loss"], each["rate"], each["norm"]) for each in steps] == told
        assert any(norm > 0.32 for _, _, norm in told)
        assert any(norm < 0.32 for _, _, norm in told)
    if not stop:
        assert lines(tmp_path / "waits") == lines(tmp_path / "overlaps")
    saved = [
        sorted(each.name for each in (tmp_path / name / "checkpoints").iterdir()) for name in ("waits", "overlaps")
    ]
    assert "step-00000016" in saved[0]
    assert saved[0] == saved[1] or stop


def test_a_loss_that_is_not_finite_is_left_out_though_its_gradients_are(tmp_path: Path) -> None:
    """Its gradients alone would not tell."""
    file = write(tmp_path, ("cross_entropy", "mine.py:sometimes"))
    with (tmp_path / "mine.py").open("a") as mine:
        mine.write("\n\ncalls = []\n\n\ndef sometimes(outputs, target):\n    calls.append(1)\n")
        mine.write("    bad = float('inf') if 9 <= len(calls) <= 12 else 0.0\n")
        mine.write("    return nn.functional.cross_entropy(outputs, target) + bad\n")
    found = []
    for overlap in ("false", "true"):
        config = read_config(file, ["train.skip=1", f"pipeline.overlap={overlap}"])
        kept, job = Kept(), build(config)
        with job.pipeline(None) as pipe:
            trainer = make_trainer(config, job, pipe)
            trainer.callbacks.append(kept)
            trainer.run()
            found.append([each.clone() for each in pipe.parameters()])
        assert [each.number for each in kept.steps if each.skipped] == [3]
        assert kept.steps[2].norm is None
        assert kept.steps[2].loss == float("inf")
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    config = read_config(file, ["train.skip=0"])
    job = build(config)
    with job.pipeline(None) as pipe, pytest.raises(NotFiniteError, match="the loss of step 3 is inf, in microbatch 0"):
        make_trainer(config, job, pipe).run()


def test_where_it_does_not_run_steps_wait_and_asking_for_it_says_why(tmp_path: Path) -> None:
    file = write(tmp_path)
    for low in ("fp16", "bf16"):
        with pytest.raises(
            ConfigError, match=rf"pipeline\.overlap is true, but train\.precision is {low}, which keeps"
        ):
            read_config(file, ["pipeline.overlap=true", f"train.precision={low}"])
    with pytest.raises(ConfigError, match=r"pipeline\.overlap is 'maybe', but it must be true, false or 'auto'"):
        read_config(file, ["pipeline.overlap=maybe"])
    for settings in (["train.precision=fp16"], ["train.precision=bf16"], ["pipeline.schedule=1f1b"]):
        config = read_config(file, ["pipeline.schedule=zb-h2", "pipeline.overlap=auto", *settings])
        job = build(config)
        with job.pipeline(None) as pipe:
            assert make_trainer(config, job, pipe).training is None
