"""PipelineTrainer with a process for each device, against transformers.Trainer on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hf.on_ranks import SETTINGS, same_as_plain, write_plain
from tests.run.forked import Launch


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_leave_the_weights_and_logs_of_one_device(ranks: int, launch: Launch, tmp_path: Path) -> None:
    for name in SETTINGS:
        write_plain(str(tmp_path), name)
    launch(same_as_plain, ranks, str(tmp_path), *SETTINGS, timeout=300.0)
