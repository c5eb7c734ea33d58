"""Processes with a GPU: several that share one, through Gloo and pinned buffers, and one of its own, through NCCL."""

import pytest
import torch

from tests.run.forked import launch
from tests.run.on_gpu import planned_on_the_gpu, steps_on_the_gpu, with_nccl

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]


@pytest.mark.parametrize(("schedule", "remat"), [("1f1b", "none"), ("zb-v", "none"), ("interleaved", "layer")])
def test_four_ranks_share_a_gpu(schedule: str, remat: str) -> None:
    launch(steps_on_the_gpu, 4, schedule, remat)


def test_one_rank_with_nccl_runs_the_same_path() -> None:
    launch(with_nccl, 1)


def test_ranks_that_share_a_gpu_measure_their_links_and_have_one_plan() -> None:
    launch(planned_on_the_gpu, 2)
