"""Processes with a GPU: through its memory, over NCCL, and over Gloo and pinned buffers. Ranks may share a GPU: always,
but over NCCL from 2.31 on with NCCL_MULTI_RANK_GPU_ENABLE=1.
"""

import contextlib
import ctypes
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gapless.schedule.recipes import RECIPES
from tests.run.crew import Server
from tests.run.forked import Launch
from tests.run.on_gpu import (
    changes_its_shape,
    chooses_its_schedule,
    chunks,
    makes_another_shape,
    many_steps,
    planned_on_the_gpu,
    steps_on_the_gpu,
    trees_on_the_gpu,
    varies_its_shape,
    waits_for_a_killed_rank,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]

SYNCHRONOUS = [name for name, recipe in RECIPES.items() if recipe.synchronous and name != "optimal"]


@pytest.fixture(params=["memory", "gloo", "nccl"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def nccl_version() -> int:
    """Of the library that is loaded, which need not be the one that torch was built with."""
    found = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(found))
    return found.value


def check_ranks(backend: str, ranks: int) -> None:
    shared = nccl_version() >= 23100 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if backend == "nccl" and torch.cuda.device_count() < ranks and not shared:
        pytest.skip(f"{ranks} ranks over NCCL need {ranks} GPUs, or NCCL 2.31 and NCCL_MULTI_RANK_GPU_ENABLE=1")


@pytest.mark.parametrize(("schedule", "remat"), [("1f1b", "none"), ("zb-v", "none"), ("interleaved", "layer")])
def test_four_ranks_have_the_bits_of_the_plain_loop(backend: str, schedule: str, remat: str, launch: Launch) -> None:
    check_ranks(backend, 4)
    launch(steps_on_the_gpu, 4, backend, schedule, remat)


@pytest.mark.parametrize(("schedule", "remat"), [("1f1b", "none"), ("zb-v", "stage"), ("zb-h1", "layer")])
def test_four_ranks_with_graphs_have_the_bits_of_the_plain_loop(
    backend: str, schedule: str, remat: str, launch: Launch
) -> None:
    check_ranks(backend, 4)
    launch(steps_on_the_gpu, 4, backend, schedule, remat, "graphs")


@pytest.mark.parametrize("backend", ["memory", "nccl"])
@pytest.mark.parametrize(
    ("schedule", "remat", "how"),
    [
        ("1f1b", "none", "static"),
        ("zb-v", "stage", "static"),
        ("interleaved", "layer", "static graphs"),
        ("1f1b", "none", "auto"),
        ("zb-h1", "none", "auto graphs"),
    ],
)
def test_four_ranks_with_static_shapes_have_the_bits_of_the_plain_loop(
    backend: str, schedule: str, remat: str, how: str, launch: Launch
) -> None:
    check_ranks(backend, 4)
    launch(steps_on_the_gpu, 4, backend, schedule, remat, how)


def test_a_step_of_another_shape_is_refused_where_shapes_are_static(backend: str, launch: Launch) -> None:
    check_ranks(backend, 3)
    said = launch(changes_its_shape, 3, backend)
    words = (
        "says: static_shapes=True says that all steps have the shapes of the first one, and the inputs of this one are"
    )
    assert said.count(f"{words} float32 [16, 64], where they were float32 [8, 64]") == 3, said


@pytest.mark.parametrize("backend", ["memory", "nccl"])
def test_a_stage_that_makes_another_shape_is_named_where_shapes_are_static(backend: str, launch: Launch) -> None:
    check_ranks(backend, 3)
    said = launch(makes_another_shape, 3, backend)
    assert (
        "rank 0 says: all steps so far had the same shapes, but a stage has now made float32 [2, 32], which it did "
        "not at this place in the first step: pass static_shapes=False" in said
    ), said
    assert len(re.findall(r"rank [012] says:", said)) == 3, said


@pytest.mark.parametrize("backend", ["memory", "nccl"])
def test_shapes_that_vary_are_noticed_and_those_that_do_not_need_no_word(backend: str, launch: Launch) -> None:
    check_ranks(backend, 3)
    launch(varies_its_shape, 3, backend)


def test_one_rank_alone_runs_the_same_path(backend: str, launch: Launch) -> None:
    launch(steps_on_the_gpu, 1, backend, "1f1b")


def test_ranks_measure_their_links_and_have_one_plan(backend: str, launch: Launch) -> None:
    check_ranks(backend, 2)
    launch(planned_on_the_gpu, 2, backend)


def test_ranks_that_reach_each_others_memory_have_two_stages_each(backend: str, launch: Launch) -> None:
    check_ranks(backend, 2)
    launch(chooses_its_schedule, 2, backend)


@pytest.mark.timeout(300)
def test_trees_of_tensors_and_changing_shapes_cross_between_ranks(backend: str, launch: Launch) -> None:
    check_ranks(backend, 2)
    launch(trees_on_the_gpu, 2, backend)


def test_the_first_loss_does_not_wait_for_the_end_of_a_step_that_waits_for_it(backend: str, launch: Launch) -> None:
    """The first use of an NCCL group is a meeting of its ranks. The last stage met the first one for the loss before it
    sent the gradients that the first one needed to get there: nothing moved ever again.
    """
    check_ranks(backend, 2)
    launch(many_steps, 2, backend, "1f1b", "2")


@pytest.mark.timeout(300)
def test_replicas_over_nccl_have_the_sum_of_their_gradients(launch: Launch) -> None:
    check_ranks("nccl", 4)
    launch(many_steps, 4, "nccl", "1f1b,zb-v", "5", "2", timeout=200)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("schedules", chunks(SYNCHRONOUS, 7))
@pytest.mark.parametrize(("over", "graphs"), [("nccl", ""), ("memory", ""), ("memory", "graphs")])
def test_two_hundred_steps_of_every_schedule_have_the_bits_of_the_plain_loop(
    ranks: int, schedules: str, over: str, graphs: str, launch: Launch
) -> None:
    check_ranks(over, ranks)
    print(launch(many_steps, ranks, over, schedules, "200", "1", graphs, timeout=800))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [4, 8])
def test_two_hundred_steps_of_replicas_over_nccl_have_the_bits_of_the_plain_loop(ranks: int, launch: Launch) -> None:
    check_ranks("nccl", ranks)
    print(launch(many_steps, ranks, "nccl", "1f1b,zb-h1,zb-v", "200", "2", timeout=800))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("backend", "how"), [("memory", ""), ("memory", "static"), ("gloo", ""), ("nccl", "")])
def test_a_killed_rank_is_named_by_all_others(backend: str, how: str, server: Server, tmp_path: Path) -> None:
    """What waits on a GPU for a rank that is gone has to be ended too."""
    check_ranks(backend, 3)
    with server.crew(waits_for_a_killed_rank, 3, backend, how, folder=tmp_path) as crew:
        crew.wait_for("step\nstep\nstep")
        time.sleep(random.random() / 10)
        crew.signal(1, signal.SIGKILL)
        crew.ended(seconds=30)
        for rank in (0, 2):
            assert "rank 1 is dead" in crew.said(rank), crew.everything()
            assert "stage" in crew.said(rank), crew.everything()


@contextlib.contextmanager
def multi_process_service(folder: Path) -> Iterator[dict[str, str]]:
    """NVIDIA's MPS of this test's own, as an environment for its ranks; it is ended in any case."""
    places = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    for place in places.values():
        Path(place).mkdir(parents=True)
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env={**os.environ, **places}, check=True)
    try:
        yield places | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "33"}
    finally:
        subprocess.run(
            ["nvidia-cuda-mps-control"],
            env={**os.environ, **places},
            input="quit\n",
            text=True,
            check=False,
            timeout=60,
        )


def used_mebibytes() -> int:
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("run", "how"), [(0, ""), (1, ""), (2, ""), (3, "static")])
def test_ranks_that_share_a_gpu_survive_the_death_of_one_of_them(
    run: int, how: str, server: Server, tmp_path: Path
) -> None:
    """Under MPS, which ends all its clients when one of them fails."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        pytest.skip("nvidia-cuda-mps-control is not there")
    chance, before, took = random.Random(run), used_mebibytes(), []
    with multi_process_service(tmp_path / "mps") as environment:
        words = [f"{name}={value}" for name, value in environment.items()]
        for _ in range(10):
            killed = chance.randrange(3)
            with server.crew(waits_for_a_killed_rank, 3, "memory", how, *words, folder=tmp_path) as crew:
                crew.wait_for("step\nstep\nstep")
                time.sleep(chance.random() / 10)
                crew.signal(killed, signal.SIGKILL)
                crew.ended(seconds=10)
                took.append(crew.took)
                for rank in {0, 1, 2} - {killed}:
                    assert f"rank {killed} is dead" in crew.said(rank), crew.everything()
                    assert "stage" in crew.said(rank), crew.everything()
                    assert re.search(r"(action|which) \d+[A-Z]\d+", crew.said(rank)), crew.everything()
    for _ in range(100):
        if used_mebibytes() <= before + 16:
            break
        time.sleep(0.1)
    print(f"all ended after at most {max(took):.1f} s; {before} MiB were used before, {used_mebibytes()} MiB after")
    assert used_mebibytes() <= before + 16
