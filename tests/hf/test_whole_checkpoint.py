"""Runs that are killed while Trainer saves go on from the last checkpoint that is whole."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gapless.errors import ConfigError
from tests.hf.training import arguments, trained
from tests.model.hub import gpt2

pytestmark = pytest.mark.usefixtures("traced_once")
FILES = ("config.json", "optimizer.pt", "trainer_state.json")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(name: str) -> None:
    """Half of the file of that name is written, in whatever way Trainer writes it."""
    from transformers.trainer_callback import TrainerState

    save = torch.save

    def opened(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and str(args[0]).endswith(name) and "w" in str(args[1]) and name == "config.json":
            die()

    def saved(value: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        save(value, path, *args, **kwargs)
        if str(path).endswith(name):
            os.truncate(path, os.path.getsize(path) // 2)
            die()

    def half(state: Any, path: str) -> None:
        Path(path).write_text('{"global_step": 2, "log_hi')
        die()

    sys.addaudithook(opened)
    torch.save = saved  # type: ignore[assignment]
    TrainerState.save_to_json = half


def killed_at(save: Any, name: str) -> int:
    """How a process ended that saves and is killed."""
    child = os.fork()
    if not child:
        try:
            die_at(name)
            save()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_run_that_is_killed_in_a_save_goes_on_from_the_last_whole_checkpoint(tmp_path: Path) -> None:
    """Trainer itself ends in FileNotFoundError."""
    from gapless.hf import PipelineTrainer

    folders = {name: tmp_path / name for name in FILES}

    class Killed(PipelineTrainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            if self.state.global_step == 2:
                for name, folder in folders.items():
                    shutil.copytree(self.args.output_dir, folder)
                    before, self.args.output_dir = self.args.output_dir, str(folder)
                    assert killed_at(lambda: PipelineTrainer._save_checkpoint(self, model, trial), name) == -9
                    self.args.output_dir = before
            super()._save_checkpoint(model, trial)

    own: dict[str, Any] = {"devices": 2, "pipeline": {"intra_op_threads": 1}}
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    _, wanted = trained(Killed, gpt2(), arguments(tmp_path / "whole", **saving), **own)
    for name, folder in folders.items():
        left = {path.name for path in (folder / "checkpoint-2").iterdir()}
        assert left < {path.name for path in (tmp_path / "whole" / "checkpoint-2").iterdir()} or name == FILES[-1]
        for asked in (True, str(folder / "checkpoint-2")) if name == "optimizer.pt" else (True,):
            copied = shutil.copytree(folder, tmp_path / f"{name} {asked is True}")
            asked = asked if asked is True else str(copied / "checkpoint-2")
            _, found = trained(PipelineTrainer, gpt2(), arguments(copied, **saving), asked, **own)  # type: ignore[arg-type]
            assert len(found) == 2
            for ours, theirs in zip(found, wanted[1:], strict=True):
                assert all(torch.equal(ours[each], theirs[each]) for each in theirs), name
    only = tmp_path / "only"
    shutil.copytree(folders["optimizer.pt"] / "checkpoint-2", only / "checkpoint-2")
    with pytest.raises(ConfigError, match=r"checkpoint-2 is incomplete, and there is no complete checkpoint before it"):
        trained(PipelineTrainer, gpt2(), arguments(only), True, **own)  # type: ignore[arg-type]


def test_a_checkpoint_that_is_written_once_more_is_not_whole_meanwhile(tmp_path: Path) -> None:
    """Its old state would vouch for a mixture of files."""
    from gapless.hf.whole_checkpoint import begin, resumed

    for step in (2, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-best").mkdir()
    assert resumed(True, str(tmp_path)) == str(tmp_path / "checkpoint-10")
    begin(tmp_path / "checkpoint-10")
    assert resumed(True, str(tmp_path)) == str(tmp_path / "checkpoint-2")
    assert resumed(None, str(tmp_path)) is None
    assert resumed(True, str(tmp_path / "none")) is True  # Trainer has words for it
    assert resumed("elsewhere", str(tmp_path)) == "elsewhere"
