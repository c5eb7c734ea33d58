"""The checkpoints of a run: which are kept, which is loaded, and what happens while training continues."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import gapless
from gapless.checkpoint import Checkpoints
from gapless.checkpoint.disk import Disk
from gapless.errors import CheckpointError, ConfigError
from tests.checkpoint.disks import CountedDisk, full
from tests.checkpoint.test_save import pipeline, sgd, step


@pytest.fixture
def pipe() -> Iterator[gapless.Pipeline]:
    with pipeline() as made:
        yield made


def steps(run: Checkpoints) -> list[int]:
    return [each.step for each in run.saved]


@pytest.mark.parametrize("background", [False, True])
def test_the_last_and_the_best_are_kept(background: bool, tmp_path: Path, pipe: gapless.Pipeline) -> None:
    optimizer = sgd(pipe.parameters())
    metrics = {1: 0.5, 2: 0.1, 3: float("nan"), 4: 0.3, 5: None, 6: 0.2}
    with Checkpoints(tmp_path / "run", pipe, keep=2, best=1, background=background) as run:
        assert (run.latest, run.best) == (None, None)
        for metric in metrics.values():
            step(pipe, optimizer)
            assert run.save(optimizer, metric=metric) == tmp_path / "run" / f"step-{pipe.steps:08d}"
        run.wait()
        assert steps(run) == [2, 5, 6]
        assert (run.latest, run.best) == (tmp_path / "run" / "step-00000006", tmp_path / "run" / "step-00000002")
        assert os.readlink(tmp_path / "run" / "latest") == "step-00000006"
        assert sorted(os.listdir(tmp_path / "run")) == ["latest", *(f"step-0000000{number}" for number in (2, 5, 6))]
    with Checkpoints(tmp_path / "run", pipe, keep=1, best=2, better="higher") as run:
        assert run.best == tmp_path / "run" / "step-00000006"
        step(pipe, optimizer)
        run.save(optimizer, metric=0.15)
        run.wait()
        assert steps(run) == [6, 7]


def test_what_is_saved_in_the_background_is_what_was_there_when_save_was_called(
    tmp_path: Path, pipe: gapless.Pipeline
) -> None:
    written, go = threading.Event(), threading.Event()

    class Slow(Disk):
        def create(self, path: Path) -> int:
            written.set()
            assert go.wait(30)
            return super().create(path)

    optimizer = sgd(pipe.parameters())
    step(pipe, optimizer)
    expected = {name: value.clone() for name, value in pipe.state_dict().items()}
    kept = [optimizer.state[each]["momentum_buffer"].clone() for each in pipe.parameters()]
    with Checkpoints(tmp_path / "run", pipe, disk=Slow()) as run:
        run.save(optimizer, extra={"position": 1})
        assert written.wait(30)
        assert run.latest is None
        for _ in range(2):
            step(pipe, optimizer)
        go.set()
        run.wait()
        assert run.load(fresh := sgd(pipe.parameters())) == {"position": 1}
    assert pipe.steps == 1
    assert all(torch.equal(value, expected[name]) for name, value in pipe.state_dict().items())
    assert all(
        torch.equal(fresh.state[each]["momentum_buffer"], value)
        for each, value in zip(pipe.parameters(), kept, strict=True)
    )


def test_a_save_that_fails_in_the_background_is_told_by_the_next_call_and_the_one_after_works(
    tmp_path: Path, pipe: gapless.Pipeline
) -> None:
    optimizer = sgd(pipe.parameters())
    with Checkpoints(tmp_path / "run", pipe, disk=CountedDisk(6, full(28))) as run:
        run.save(optimizer)
        with pytest.raises(CheckpointError, match="No space left on device; an earlier checkpoint is as it was"):
            run.save(optimizer)
        assert os.listdir(tmp_path / "run") == []
        run.save(optimizer)
        run.wait()
        assert steps(run) == [0]


def test_a_failed_save_does_not_hide_the_error_of_the_training_loop(tmp_path: Path, pipe: gapless.Pipeline) -> None:
    def trains() -> None:
        with Checkpoints(tmp_path / "run", pipe, disk=CountedDisk(6, full(28))) as run:
            run.save(sgd(pipe.parameters()))
            raise ValueError("no more data")

    with pytest.raises(ValueError, match="no more data") as told:
        trains()
    assert "the save that was under way: can't save" in told.value.__notes__[0]


def test_a_step_before_the_last_is_refused_for_it_would_be_removed_at_once(
    tmp_path: Path, pipe: gapless.Pipeline
) -> None:
    optimizer = sgd(pipe.parameters())
    with Checkpoints(tmp_path / "run", pipe, keep=1, background=False) as run:
        pipe.steps = 9
        run.save(optimizer)
        pipe.steps = 3
        with pytest.raises(CheckpointError, match="run has step-00000009, but this is step 3: load that one first"):
            run.save(optimizer)
        assert steps(run) == [9]
        (tmp_path / "run" / "step-00000009" / "manifest.json").write_text("{}")  # a damaged one takes nobody's place
        run.save(optimizer)
        assert [(each.step, bool(each.fault)) for each in run.saved] == [(3, False), (9, True)]


class NoLinks(Disk):
    """A file system without symbolic links."""

    def link(self, path: Path, to: str) -> bool:
        return False


def test_a_file_system_without_links_has_no_latest_and_all_else(tmp_path: Path, pipe: gapless.Pipeline) -> None:
    with Checkpoints(tmp_path / "run", pipe, disk=NoLinks()) as run:
        run.save(sgd(pipe.parameters()))
    assert (os.listdir(tmp_path / "run"), run.latest) == (["step-00000000"], tmp_path / "run" / "step-00000000")


def test_a_second_run_in_the_same_folder_is_refused_until_the_first_has_gone(
    tmp_path: Path, pipe: gapless.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gapless.checkpoint.collection._LOCK_WITHIN", 0.0)
    program = (
        "import sys; from pathlib import Path; from gapless.checkpoint.disk import HeldFolder; "
        "held = HeldFolder(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    (tmp_path / "run").mkdir()
    words = [sys.executable, "-c", program, str(tmp_path / "run")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(
            CheckpointError, match=r"another process is saving to .*run: end it, or choose another folder"
        ):
            Checkpoints(tmp_path / "run", pipe)
        other.kill()
    with Checkpoints(tmp_path / "run", pipe) as run:
        run.save(sgd(pipe.parameters()))
    with pytest.raises(CheckpointError, match="were closed: make a new object"):
        run.save(sgd(pipe.parameters()))


def test_what_killed_saves_have_left_goes_and_what_is_not_ours_stays(tmp_path: Path, pipe: gapless.Pipeline) -> None:
    folder = tmp_path / "run"
    for name in (".step-00000005.0123456789abcdef.aside", "notes", ".hidden", "step-5"):
        (folder / name).mkdir(parents=True)
    (folder / ".latest.0123456789abcdef.aside").symlink_to("step-00000005")
    with Checkpoints(folder, pipe, keep=1, best=0) as run:
        for _ in range(2):
            run.save(sgd(pipe.parameters()))
            pipe.steps += 1
    assert sorted(os.listdir(folder)) == [".hidden", "latest", "notes", "step-00000001", "step-5"]


def test_the_newest_is_never_what_a_link_leads_to(tmp_path: Path, pipe: gapless.Pipeline) -> None:
    optimizer = sgd(pipe.parameters())
    pipe.save(tmp_path / "elsewhere", optimizer)
    with Checkpoints(tmp_path / "run", pipe) as run:
        run.save(optimizer)
        run.wait()
        (tmp_path / "run" / "latest").unlink()
        (tmp_path / "run" / "latest").symlink_to("../elsewhere")
        assert run.latest == tmp_path / "run" / "step-00000000"
        with pytest.raises(CheckpointError, match="latest is a link out of its folder"):
            pipe.load(tmp_path / "run" / "latest", optimizer)
        (tmp_path / "run" / "step-00000009").symlink_to("../elsewhere")
        words = r"step-00000009 is a link out of its folder.*: remove it to resume from step-00000000$"
        with pytest.raises(CheckpointError, match=words):
            run.load(optimizer)


def test_nobody_is_told_to_remove_what_only_can_not_be_read(tmp_path: Path, pipe: gapless.Pipeline) -> None:
    optimizer = sgd(pipe.parameters())
    with Checkpoints(tmp_path / "run", pipe) as run:
        for _ in range(2):
            step(pipe, optimizer)
            run.save(optimizer)
        run.wait()
        newest = tmp_path / "run" / "step-00000002"
        for file in (newest / "manifest.json", next(newest.glob("*.safetensors"))):
            with (
                unreadable(file, tmp_path),
                pytest.raises(
                    CheckpointError, match=rf"{file.name} can't be read: Permission denied; it may be intact"
                ),
            ):
                run.load(optimizer)
        next(newest.glob("*.safetensors")).write_bytes(b"")
        with pytest.raises(CheckpointError, match="remove it to resume from step-00000001"):
            run.load(optimizer)


@contextmanager
def unreadable(file: Path, below: Path) -> Iterator[None]:
    """For this user; the administrator reads everything, and so becomes somebody else meanwhile."""
    user = os.geteuid()
    folders = [each for each in (below, *below.parents) if each.stat().st_uid == user and each != Path("/")]
    modes = {path: path.stat().st_mode for path in (file, *folders)}
    for path in folders:
        path.chmod(modes[path] | 0o755)
    file.chmod(0)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if user == 0:
            os.seteuid(user)
        for path, mode in modes.items():
            path.chmod(mode)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep": 0}, "keep is 0, but at least one"),
        ({"best": -1}, "best is -1"),
        ({"better": "more"}, "better is 'more', but it must be one of 'lower', 'higher'"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: dict[str, Any], words: str, tmp_path: Path, pipe: gapless.Pipeline
) -> None:
    with pytest.raises(ConfigError, match=words):
        Checkpoints(tmp_path / "run", pipe, **options)


def test_there_is_nothing_to_go_on_from_in_a_new_folder(tmp_path: Path, pipe: gapless.Pipeline) -> None:
    with (
        Checkpoints(tmp_path / "run", pipe) as run,
        pytest.raises(CheckpointError, match="has no checkpoint to resume"),
    ):
        run.load(sgd(pipe.parameters()))
