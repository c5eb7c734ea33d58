"""Whose line it is: a folder may be called `gapless` or `torch` and still hold a user's code."""

import contextlib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gapless
from gapless.errors import PartitionError, note_place, noted_place
from gapless.model.code_origin import is_users
from gapless.train.config.user_code import described

_MODEL = """
from torch import nn


class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        if self.first(x).sum() > 0:
            x = -x
        return self.second(x)


def fail():
    raise ValueError("mine")
"""


def loaded(file: Path) -> Any:
    file.parent.mkdir(parents=True)
    file.write_text(_MODEL)
    spec = spec_from_file_location("mine", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("folder", ["gapless", "torch", "gapless/torch/nn"])
def test_a_users_file_below_a_folder_of_that_name_learns_its_line(folder: str, tmp_path: Path) -> None:
    """In a clone named gapless, as the README makes it, nobody learnt a line: every file was taken for ours."""
    file = tmp_path / folder / "mine.py"
    mine = loaded(file)
    with pytest.raises(PartitionError) as info:
        gapless.Pipeline(mine.Mine(), devices=2, microbatches=1, loss=F.mse_loss, example=torch.randn(2, 4))
    assert f"({file}, line 11, in forward)" in str(info.value)
    with pytest.raises(ValueError, match="mine") as failed:
        mine.fail()
    assert described(failed.value) == "ValueError: mine, at mine.py, line 17, in fail"


def test_ours_torchs_and_pythons_own_files_are_no_users() -> None:
    for package in (torch, gapless):
        assert not is_users(str(Path(package.__path__[0]) / "nn" / "any.py"))
        assert is_users(f"{package.__path__[0]}_of_mine/any.py")
    assert not is_users(contextlib.__file__)
    assert not is_users("<string>")
    assert is_users(__file__)
    assert is_users(pytest.__file__)  # another library: its line is one to know
    assert is_users(str(Path(gapless.__path__[0]) / "zoo" / "gpt.py"))


def test_a_users_note_that_mentions_the_name_is_not_taken_for_ours() -> None:
    error = ValueError("mine")
    error.add_note("see ~/gapless/README")
    assert noted_place(error) == ""
    note_place(error, "on device 1")
    assert noted_place(error) == "on device 1"
    assert described(error) == "ValueError: mine (on device 1)"
