"""What one sees: a panel on a terminal, lines elsewhere."""

import io
import json
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gapless.train.config.config import read_config
from gapless.train.run.display import Lines, Live, Speed, curve
from gapless.train.run.metrics import parts_of, read_metrics
from gapless.train.run.run_folder import RunFolder
from gapless.train.run.trainer import Callback, Step, Trainer
from gapless.train.run.training import prepared
from gapless.train.torchrun import Ranks
from tests.train.configs import GPT, write


def shown(folder: Path, *settings: str) -> str:
    """What a terminal of 100 columns got, without its escapes moving anything."""
    config = read_config(write(folder, text=GPT), ["run.tensorboard=false", "run.report=false", *settings])
    out = io.StringIO()
    with prepared(config, RunFolder(folder / "run"), Ranks()) as training:
        console = Console(file=out, force_terminal=True, width=100, color_system=None)
        training.add(Live("gpt on 2 devices", training.monitor, console=console))
        training.run()
    return out.getvalue()


def test_the_panel_shows_progress_loss_speed_bubbles_memory_and_time_left(tmp_path: Path) -> None:
    settings = ["train.steps=6", "run.timeline=2", "evaluate.every=3", "evaluate.batches=1", "train.clip=1.0"]
    last = shown(tmp_path, *settings).rpartition("gpt on 2 devices")[2]
    for word in (
        "step 6 of 6",
        "100%",
        "loss",
        "tokens/s",
        "ms per step, 0:00:00 left",
        "learning rate",
        "gradient norm",
    ):
        assert word in last, word
    for word in (
        "evaluation",
        "at step 6",
        "% measured, ",
        "% predicted",
        "memory",
        "process ",
        "iB",  # MiB, or GiB in a process that has grown
        "step-00000006",
    ):
        assert word in last, word


def test_a_name_from_a_file_is_no_markup_and_moves_no_cursor(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    config = read_config(write(tmp_path, text=GPT), ["train.steps=1", "run.tensorboard=false", "run.report=false"])
    with prepared(config, RunFolder(tmp_path / "run"), Ranks()) as training:
        training.add(Live("[bold]x[/nope] \x1b[2J", training.monitor, console=console))
        training.run()
    assert "[bold]x[/nope]" in out.getvalue()
    assert "\x1b[2J" not in out.getvalue()


def test_bars_show_the_course_of_the_loss() -> None:
    assert curve(deque([1.0, 2.0, 3.0])) == "▁▅█"
    assert curve(deque([1.0, float("nan"), 1.0])) == "▁▁"
    assert curve(deque([1.0])) == ""


def test_a_thread_may_ask_for_the_speed_at_any_time() -> None:
    """A deque that changes while it is gone through raises, and would end the thread that draws."""
    speed, done, wrong, usual = Speed(), threading.Event(), list[Exception](), sys.getswitchinterval()
    steps = [Step(number, 2.0, 0.1, None, 16, 512, 0.5, 0.1, 0.1) for number in (1, 2, 3)]
    speed.add(steps[0])

    def asks() -> None:
        try:
            while not done.is_set():
                assert (speed.seconds, speed.speed()) == (0.5, "1,024 tokens/s")
        except Exception as error:
            wrong.append(error)

    thread = threading.Thread(target=asks)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for number in range(400_000):
            speed.add(steps[min(number, 2)])
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(usual)
    assert not wrong


def test_the_first_step_of_a_resumed_run_is_cold_too() -> None:
    """Only step 1 was left out."""
    speed = Speed()
    for number, seconds in ((11, 60.0), (12, 0.5), (13, 0.5)):
        speed.add(Step(number, 2.0, 0.1, None, 16, 512, seconds, 0.1, 0.1))
        assert speed.seconds == seconds
    assert speed.speed() == "1,024 tokens/s"


def test_a_report_leaves_out_the_first_step_of_each_process() -> None:
    """Where a run was resumed on the same devices, its cold step counted."""
    start: dict[str, Any] = {"step": 0, "started": {"devices": "2"}}
    lines = [start, *({"step": step, "loss": 1.0} for step in (1, 2)), start, {"step": 3, "loss": 1.0}]
    lines += [{"step": 3, "evaluation": 1.0, "seconds": 1.0}, {"step": 4, "loss": 1.0}]
    (part,), (cold,) = parts_of(lines), parts_of(lines[:2])
    assert [line["step"] for line in part.warm_steps] == [2, 4]
    assert [line["step"] for line in part.steps] == [1, 2, 3, 4]
    assert cold.warm_steps == cold.steps


class _Loop(Callback):
    steps, step, ended = 100, 0, ""


def test_lines_tell_of_the_first_step_of_updates_left_out_and_of_the_last() -> None:
    said: list[str] = []
    lines, loop = Lines(said.append), _Loop()
    for number in (1, 2, 3):
        step = Step(number, 2.0, 0.1, None, 16, 512, 0.5, 0.1, 0.1, "the loss is nan" if number == 2 else "")
        lines.on_step(as_loop(loop), step)
    loop.ended = "Ctrl-C"
    lines.on_end(as_loop(loop))
    assert said == [
        "step   1 of 100   loss 2          500.0 ms per step   1,024 tokens/s",
        "step   2 of 100 left the weights as they were: the loss is nan",
        "step   3 of 100   loss 2          500.0 ms per step   1,024 tokens/s",
    ]


def as_loop(loop: object) -> Trainer:
    return loop  # type: ignore[return-value]


def test_lines_of_metrics_that_a_killed_process_left_half_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "los')
    assert list(read_metrics(file)) == [{"step": 1, "loss": 2.0}]
    assert list(read_metrics(tmp_path / "none")) == []


def test_every_line_of_the_metrics_is_json_also_with_a_loss_that_is_no_number(tmp_path: Path) -> None:
    config = read_config(
        write(tmp_path, ("cross_entropy", "mine.py:no_number")),
        ["train.skip=9", "train.steps=2", "run.tensorboard=false", "run.timeline=0"],
    )
    with prepared(config, RunFolder(tmp_path / "run"), Ranks()) as training:
        training.run()

    def refuse(word: str) -> None:
        raise AssertionError(word)

    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    lines = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert [line["loss"] for line in lines if "loss" in line] == ["nan", "nan"]
    assert "updates left out" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("every", [0, 3])
def test_steps_are_measured_as_often_as_asked(tmp_path: Path, every: int) -> None:
    config = read_config(write(tmp_path), [f"run.timeline={every}", "run.tensorboard=false", "run.report=false"])
    with prepared(config, RunFolder(tmp_path / "run"), Ranks()) as training:
        training.run()
        assert len(training.monitor.timelines) == (2 if every else 0)


def test_a_line_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    """A run that was killed just after a checkpoint lacked the steps that a buffer still held."""
    found: list[int] = []

    class Reads(Callback):
        def on_step(self, trainer: Trainer, step: Step) -> None:
            found.append([line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")][-1])

    config = read_config(write(tmp_path), ["run.tensorboard=false", "run.report=false"])
    with prepared(config, RunFolder(tmp_path / "run"), Ranks()) as training:
        training.add(Reads())
        training.run()
    assert found == [1, 2, 3, 4, 5, 6]
