"""Going on from a checkpoint has the bits of going on without one, whatever saves it and whatever loads it."""

from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.checkpoint.training import SCHEDULES, Training, assert_as_in, left, training
from tests.run.forked import Launch

STEPS = 2  # before the save, and as many after it
MANY = 50
COUNTS = (1, 2, 4, 8)
TRANSPORTS = {1: "auto", 2: "gloo", 4: "memory", 8: "auto"}


def on_devices(count: int) -> Training:
    return training(devices=count, schedule=SCHEDULES[count])


@cache
def uninterrupted(steps: int) -> dict[str, Tensor]:
    whole = on_devices(1)
    whole.run(2 * steps)
    return left(whole)


def saved_on_devices(folder: Path, count: int, steps: int) -> None:
    each = on_devices(count)
    with each.pipe:
        each.run(steps)
        each.save(folder / f"devices-{count}", {"position": steps})


def resumes(each: Training, folder: Path, steps: int) -> None:
    torch.manual_seed(99)  # what is drawn next comes from the checkpoint
    with each.pipe:
        assert each.load(folder) == {"position": steps}
        assert each.pipe.steps == steps
        each.run(steps)
        assert_as_in(uninterrupted(steps), left(each))


def on_ranks() -> Training:
    count = dist.get_world_size()
    mesh = init_device_mesh("cpu", (count,), mesh_dim_names=("pp",))
    return training(mesh=mesh, schedule=SCHEDULES[count], transport=TRANSPORTS[count])


def save_on_ranks(folder: str, steps: str) -> None:
    each = on_ranks()
    with each.pipe:
        each.run(int(steps))
        each.save(Path(folder) / f"ranks-{dist.get_world_size()}", {"position": int(steps)})


def resume_on_ranks(steps: str, *folders: str) -> None:
    for folder in folders:
        resumes(on_ranks(), Path(folder), int(steps))


def save_and_resume_on_ranks(folder: str, steps: str, *folders: str) -> None:
    save_on_ranks(folder, steps)
    resume_on_ranks(steps, *folders)


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2)])
def test_a_resume_on_other_devices_and_another_schedule_has_the_same_bits(
    before: int, after: int, tmp_path: Path
) -> None:
    saved_on_devices(tmp_path, before, STEPS)
    resumes(on_devices(after), tmp_path / f"devices-{before}", STEPS)


def test_ranks_and_devices_resume_from_each_other_with_the_same_bits(launch: Launch, tmp_path: Path) -> None:
    saved_on_devices(tmp_path, 4, STEPS)
    ours = tmp_path / "ranks-2"
    launch(save_and_resume_on_ranks, 2, str(tmp_path), str(STEPS), str(tmp_path / "devices-4"), str(ours))
    resumes(on_devices(2), ours, STEPS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["devices-4", "ranks-2"]


@pytest.fixture(scope="module")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After fifty steps, by every number of devices and every number of ranks."""
    folder = tmp_path_factory.mktemp("saved")
    for count in COUNTS:
        saved_on_devices(folder, count, MANY)
        launch(save_on_ranks, count, str(folder), str(MANY), timeout=400)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", COUNTS)
def test_fifty_steps_a_resume_and_fifty_more_equal_a_hundred(count: int, launch: Launch, saved: Path) -> None:
    """From any number of devices, and from ranks."""
    for name in (*(f"devices-{each}" for each in COUNTS), f"ranks-{9 - count if count in (1, 8) else 6 - count}"):
        resumes(on_devices(count), saved / name, MANY)
        print(f"from {name} to {count} devices: equal")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", COUNTS)
def test_ranks_go_on_from_any_number_of_ranks_and_from_devices(count: int, launch: Launch, saved: Path) -> None:
    names = [*(f"ranks-{each}" for each in COUNTS), f"devices-{9 - count if count in (1, 8) else 6 - count}"]
    launch(resume_on_ranks, count, str(MANY), *(str(saved / name) for name in names), timeout=800)
    print("\n".join(f"from {name} to {count} ranks: equal" for name in names))
