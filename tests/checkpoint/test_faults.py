"""Whatever happens to the disk: a checkpoint is there whole or not at all, an old one stays as it was, and what is
damaged is never loaded.
"""

import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import gapless
from gapless.checkpoint import Checkpoints
from gapless.checkpoint.disk import Disk
from gapless.checkpoint.listing import saved_in
from gapless.checkpoint.manifest import faults
from gapless.errors import CheckpointError
from tests.checkpoint.disks import ERRORS, CountedDisk, LossyDisk, PowerLoss, full

Bits = list[list[float]]


class Tiny:
    """A pipeline of two linear layers, and what an optimizer keeps of it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        self.pipe = gapless.Pipeline(model, devices=1, microbatches=1, loss=nn.functional.mse_loss)
        self.optimizer = torch.optim.SGD(self.pipe.parameters(), lr=0.1, momentum=0.9)

    def step(self) -> None:
        self.pipe.step(torch.ones(2, 2), torch.zeros(2, 1))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bits(self) -> Bits:
        parameters = list(self.pipe.parameters())
        kept = [self.optimizer.state[each]["momentum_buffer"] for each in parameters if self.optimizer.state[each]]
        return [each.detach().flatten().tolist() for each in (*parameters, *kept)]


@pytest.fixture
def tiny() -> Iterator[Tiny]:
    made = Tiny()
    with made.pipe:
        yield made


@pytest.fixture(scope="module")
def at_step() -> dict[int, Bits]:
    tiny, found = Tiny(), {}
    with tiny.pipe:
        for step in range(1, 4):
            tiny.step()
            found[step] = tiny.bits()
    return found


def first_saved(tiny: Tiny, folder: Path) -> Callable[[Path], Path]:
    """Step 1 is saved, and step 2 is done; what is returned makes a copy of that folder."""
    with Checkpoints(folder / "first" / "run", tiny.pipe, background=False) as run:
        tiny.step()
        run.save(tiny.optimizer)
    tiny.step()
    return lambda path: Path(shutil.copytree(folder / "first", path, symlinks=True)) / "run"


def save(tiny: Tiny, folder: Path, disk: Disk | None = None, *, background: bool = False) -> None:
    """One is kept: the first goes when the second is there."""
    with Checkpoints(folder, tiny.pipe, keep=1, best=0, background=background, disk=disk) as run:
        run.save(tiny.optimizer)


def assert_whole(folder: Path, newest: tuple[int, ...] = (1, 2)) -> None:
    """All checkpoints that are there are, and one is."""
    saved = saved_in(folder)
    assert [each.step for each in saved[-1:] if each.step in newest], saved
    for each in saved:
        assert list(faults(each.path)) == []


def assert_loads(folder: Path, at_step: dict[int, Bits], newest: tuple[int, ...] = (1, 2)) -> None:
    assert_whole(folder, newest)
    saved = saved_in(folder)
    fresh = Tiny()
    with fresh.pipe:
        with Checkpoints(folder, fresh.pipe) as run:
            run.load(fresh.optimizer)
        assert fresh.pipe.steps == saved[-1].step
        assert fresh.bits() == at_step[fresh.pipe.steps]
    assert not [name for name in os.listdir(folder) if name.startswith(".")]  # a new run has tidied up


def power_losses(tiny: Tiny, folder: Path, *, syncs: bool) -> Iterator[LossyDisk]:
    """Step 2 is saved again and again, and the power goes one operation later each time; at last it stays."""
    copied = first_saved(tiny, folder)
    for at in range(1000):
        root = folder / f"{at}"
        disk = LossyDisk(copied(root).parent, at, syncs=syncs)
        try:
            save(tiny, root / "run", disk)
        except PowerLoss:
            yield disk
        else:
            yield disk
            return


def test_power_loss_at_any_operation_leaves_a_whole_checkpoint(
    tmp_path: Path, tiny: Tiny, at_step: dict[int, Bits]
) -> None:
    chosen, left, count = random.Random(1), tmp_path / "left", 0
    for disk in power_losses(tiny, tmp_path, syncs=True):
        count += 1
        for kind in ("synced", "names", "chance"):
            disk.left(left, chosen if kind == "chance" else None, names=kind == "names")
            assert_whole(left / "run")
            if kind == "chance":
                assert_loads(left / "run", at_step)
            shutil.rmtree(left)
    disk.left(left, None)
    assert_loads(left / "run", at_step, newest=(2,))  # `save` has returned, so all of it is on the disk
    assert count > 25


def test_a_disk_that_only_says_it_syncs_leaves_broken_checkpoints(tmp_path: Path, tiny: Tiny) -> None:
    """So the test above sees a sync that is missing."""
    left, broken = tmp_path / "left", 0
    for disk in power_losses(tiny, tmp_path, syncs=False):
        disk.left(left, None, names=True)
        try:
            assert_whole(left / "run")
        except AssertionError:
            broken += 1
        shutil.rmtree(left)
    assert broken


@pytest.mark.parametrize(
    ("error", "background"),
    [
        ("ENOSPC", True),
        ("EIO", False),
        pytest.param("ENOSPC", False, marks=pytest.mark.slow),
        pytest.param("EIO", True, marks=pytest.mark.slow),
    ],
)
def test_a_full_or_broken_disk_leaves_a_whole_checkpoint_and_is_named(
    error: str, background: bool, tmp_path: Path, tiny: Tiny, at_step: dict[int, Bits]
) -> None:
    copied, words = first_saved(tiny, tmp_path), os.strerror(ERRORS[error])
    for at in range(1000):
        folder = copied(tmp_path / f"{at}")
        disk = CountedDisk(at, full(ERRORS[error]))
        told = ""
        try:
            save(tiny, folder, disk, background=background)
        except CheckpointError as raised:
            told = str(raised)
        if disk.done <= at:
            break
        assert at == 1 or (told.startswith(f"can't save {folder}") and f": {words}" in told)  # 1: a look at the folder
        assert_whole(folder)
    assert at > 25
    assert_loads(folder, at_step, newest=(2,))


def test_a_file_that_grows_too_large_for_the_system_is_an_error_of_one_sentence(tmp_path: Path, tiny: Tiny) -> None:
    tiny.step()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        with pytest.raises(CheckpointError, match=r"can't save .*: .*manifest.json: File too large; an earlier"):
            tiny.pipe.save(tmp_path / "a", tiny.optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path) == []
    tiny.pipe.save(tmp_path / "a", tiny.optimizer)


def test_any_flipped_byte_and_any_truncation_is_found(tmp_path: Path, tiny: Tiny, at_step: dict[int, Bits]) -> None:
    tiny.step()
    tiny.pipe.save(tmp_path / "whole", tiny.optimizer, extra={"tensor": torch.arange(3)})
    chosen = random.Random(2)
    other = Tiny()
    before = other.bits()
    with other.pipe:
        for number in range(40):
            folder = tmp_path / f"{number}"
            shutil.copytree(tmp_path / "whole", folder)
            file = folder / chosen.choice(sorted(os.listdir(folder)))
            data = bytearray(file.read_bytes())
            at = chosen.randrange(len(data))
            if number % 4:
                data[at] ^= 1 << chosen.randrange(8)
            file.write_bytes(data if number % 4 else data[:at])
            assert list(faults(folder)), (file, at)
            with pytest.raises(CheckpointError, match=str(folder)):
                other.pipe.load(folder, other.optimizer)
            assert (other.bits(), other.pipe.steps) == (before, 0)
        other.pipe.load(tmp_path / "whole", other.optimizer)
        assert other.bits() == at_step[1]
