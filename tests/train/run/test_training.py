"""A run from its config to its report: it goes on where it was, and ends as it should."""

import gc
import json
import math
import os
import signal
import sys
import threading
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gapless
from gapless.cli import main
from gapless.errors import ConfigError, GaplessError
from gapless.train.config.config import Config, read_config
from gapless.train.data.feed import make_feeds
from gapless.train.job import build
from gapless.train.run import saver
from gapless.train.run.evaluation import mean_loss
from gapless.train.run.metrics import read_metrics
from gapless.train.run.run_folder import RunFolder, folder_of
from gapless.train.run.trainer import NotFiniteError
from gapless.train.run.training import Training, make_trainer, prepared
from gapless.train.torchrun import Ranks
from tests.programs import Programs
from tests.train.configs import GPT, Kept, trained, write

QUIET = ["run.tensorboard=false", "run.report=false", "run.timeline=0"]
MORE = """

def late_nan(outputs, target, state=[0]):
    state[0] += 1
    loss = torch.nn.functional.cross_entropy(outputs, target)
    return loss * float("nan") if state[0] in (6, 10) else loss


def few(minibatch, seed):
    for _ in range(3):
        yield torch.zeros(minibatch, 8), torch.zeros(minibatch, dtype=torch.long)


def worse(outputs, target):
    return -torch.nn.functional.cross_entropy(outputs, target)
"""


def config_of(tmp_path: Path, *settings: str, text: str | None = None) -> Config:
    file = write(tmp_path) if text is None else write(tmp_path, text=text)
    with (tmp_path / "mine.py").open("a") as mine:
        mine.write(MORE)
    return read_config(file, [*QUIET, *settings])


def run(config: Config, folder: Path, **options: Any) -> tuple[Training, dict[str, Any], Kept]:
    """As `gapless train` does it. What is left are the weights too."""
    kept = Kept()
    with prepared(config, RunFolder(folder), Ranks(), **options) as training:
        training.add(kept)
        training.run()
        weights = {name: each.detach().clone() for name, each in training.pipe.state_dict().items()}
    return training, weights, kept


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


# -- going on ---------------------------------------------------------------------------------------------------------


def test_a_run_that_goes_on_has_the_bits_of_one_that_was_never_interrupted(tmp_path: Path) -> None:
    """With dropout, a data function in the middle of its pass, AdamW and a schedule of the learning rate."""
    rates = ["scheduler.name=cosine", "scheduler.warmup=2", "scheduler.steps=6"]
    config = config_of(tmp_path, *rates)
    _, whole, kept = run(config, tmp_path / "whole")
    _, _, first = run(config.changed(steps=3), tmp_path / "parts")
    _, parts, second = run(config.changed(devices=3, schedule="1f1b"), tmp_path / "parts")
    assert [step.number for step in second.steps] == [4, 5, 6]
    assert [step.loss for step in kept.steps] == [step.loss for step in first.steps + second.steps]
    assert [step.rate for step in kept.steps] == [step.rate for step in first.steps + second.steps]
    assert equal(whole, parts)
    lines = [line for line in read_metrics(tmp_path / "parts" / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in lines] == [step.loss for step in kept.steps]
    assert [line["step"] for line in read_metrics(tmp_path / "parts" / "metrics.jsonl") if "ended" in line] == [6]


def test_checkpoints_come_every_n_steps_and_the_steps_after_the_last_one_are_done_again(tmp_path: Path) -> None:
    config = config_of(tmp_path, "checkpoint.every=2", "checkpoint.keep=1")

    class Dies(Kept):
        def on_step(self, trainer: Any, step: Any) -> None:
            super().on_step(trainer, step)
            if step.number == 5:
                raise KeyError("as if it were killed")

    with prepared(config, RunFolder(tmp_path / "run"), Ranks()) as training:
        training.add(Dies())
        with pytest.raises(KeyError):
            training.run()
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["latest", "step-00000004"]
    _, again, kept = run(config, tmp_path / "run")
    assert [step.number for step in kept.steps] == [5, 6]
    assert equal(again, run(config, tmp_path / "whole")[1])
    steps = [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_run_that_goes_on_keeps_its_threads_unless_told_otherwise(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run(config.changed(steps=1, threads=3), tmp_path / "run")
    assert run(config.changed(steps=2), tmp_path / "run")[0].config.pipeline.threads == 3
    assert run(config.changed(steps=3, threads=1), tmp_path / "run")[0].config.pipeline.threads == 1


def test_what_is_held_out_may_not_change_since_the_order_of_the_data_would(tmp_path: Path) -> None:
    run(config_of(tmp_path, "train.steps=1", text=GPT), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"had .* windows to train on when the run was saved, and .* now; continue"):
        run(config_of(tmp_path, "train.steps=2", "evaluate.every=1", text=GPT), tmp_path / "run")


def test_a_folder_with_nothing_to_go_on_from_takes_another_config(tmp_path: Path) -> None:
    with pytest.raises(NotFiniteError):
        run(config_of(tmp_path, "loss.name=mine.py:no_number"), tmp_path / "run")
    assert len(run(config_of(tmp_path, "optimizer.arguments.lr=0.5"), tmp_path / "run")[2].steps) == 6


def test_the_command_line_finds_the_checkpoints_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(config_of(tmp_path), tmp_path / "run")
    assert main(["checkpoint", "list", str(tmp_path / "run")]) == 0
    assert "step-00000006" in capsys.readouterr().out
    (tmp_path / "run" / "checkpoints" / "latest").unlink()  # as where the file system has no links
    quiet = [word for each in QUIET for word in ("--set", each)]
    words = ["train", str(tmp_path / "mine.toml"), "--folder", str(tmp_path / "run"), *quiet, "--resume"]
    assert main(words) == 0
    assert capsys.readouterr().err == ""
    assert main([*words, "elsewhere"]) == 0
    told = f"gapless: {tmp_path / 'run'} holds a run, which is resumed; --resume CHECKPOINT is for a new folder\n"
    assert capsys.readouterr().err == told


def test_minutes_count_too(tmp_path: Path) -> None:
    run(config_of(tmp_path, "checkpoint.minutes=1e-9", "checkpoint.keep=9"), tmp_path / "run")
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 6


@pytest.mark.parametrize(("options", "saves"), [((), 6), (("checkpoint.every=4",), 2)])
def test_a_run_saves_by_time_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], saves: int
) -> None:
    assert saver._MINUTES == 10
    monkeypatch.setattr(saver, "_MINUTES", 1e-9)
    run(config_of(tmp_path, *options, "checkpoint.keep=9"), tmp_path / "run")
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == saves


def test_another_config_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    run(config_of(tmp_path), tmp_path / "run")
    with pytest.raises(ConfigError) as error:
        run(config_of(tmp_path, "optimizer.arguments.lr=0.5"), tmp_path / "run")
    assert str(error.value) == (
        f"{tmp_path / 'run'} holds a run with another config: optimizer.arguments.lr was 0.01, and is "
        "0.5 now: resume with that one, or choose another folder with --folder, or --fresh"
    )
    assert folder_of(config_of(tmp_path), str(tmp_path / "run"), fresh=True).path == tmp_path / "run-2"


def test_half_files_of_a_run_that_was_killed_go(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.json.0123456789abcdef.aside").write_text('{"conf')
    run(config_of(tmp_path), tmp_path / "run")
    assert not [name for name in os.listdir(tmp_path / "run") if name.startswith(".")]


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_is_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gapless.train.run.run_folder._LOCK_WITHIN", 0.0)
    config = config_of(tmp_path)
    with (
        prepared(config, RunFolder(tmp_path / "run"), Ranks()),
        pytest.raises(ConfigError, match=r"another run is training in .*run: wait for it or end it, or choose another"),
        prepared(config, RunFolder(tmp_path / "run"), Ranks()),
    ):
        pass
    run(config, tmp_path / "run")  # it was given back


# -- how it ends ------------------------------------------------------------------------------------------------------


def test_updates_whose_loss_is_not_finite_are_left_out_and_counted(tmp_path: Path) -> None:
    config = config_of(tmp_path, "loss.name=mine.py:late_nan", "train.skip=2", "pipeline.schedule=gpipe")
    _, _, kept = run(config, tmp_path / "run")  # 4 microbatches in a step
    assert [step.number for step in kept.steps if step.skipped] == [2, 3]
    assert kept.steps[1].skipped == "the loss of step 2 is nan, in microbatch 1 of 4"
    assert kept.steps[2].skipped == "the loss of step 3 is nan, in microbatch 1 of 4"


def test_too_many_of_them_end_it_and_name_the_step_and_the_microbatch(tmp_path: Path) -> None:
    config = config_of(tmp_path, "loss.name=mine.py:late_nan", "pipeline.schedule=gpipe")
    with pytest.raises(NotFiniteError, match=r"the loss of step 2 is nan, in microbatch 1 of 4: a smaller learning"):
        run(config, tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_a_second_ctrl_c_saves_nothing_of_a_step_that_is_half_done(tmp_path: Path) -> None:
    class Impatient(Kept):
        def on_step(self, trainer: Any, step: Any) -> None:
            if step.number == 3:
                trainer.stop("Ctrl-C")
                raise KeyboardInterrupt

    with prepared(config_of(tmp_path), RunFolder(tmp_path / "run"), Ranks()) as training:
        training.add(Impatient())
        with pytest.raises(KeyboardInterrupt):
            training.run()
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_all_callbacks_hear_of_the_end_whatever_one_of_them_raises(tmp_path: Path) -> None:
    heard = list[int]()

    class Ends(Kept):
        def on_end(self, trainer: Any) -> None:
            heard.append(len(heard))
            raise OSError(f"the disk is full: {heard[-1]}")

    config = config_of(tmp_path, "train.steps=1")
    job = build(config)
    with job.pipeline(None) as pipe:
        trainer = make_trainer(config, job, pipe)
        trainer.callbacks += [Ends(), Ends()]
        with pytest.raises(OSError, match="the disk is full: 0"):
            trainer.run()
    assert heard == [0, 1]


def test_replicas_of_different_sizes_find_the_same_mean_loss() -> None:
    """Each counts its own samples; a bit between them, and the ranks would go different ways."""
    losses = torch.rand(100, 3, generator=torch.Generator().manual_seed(0)).double().tolist()
    for each in losses:
        assert mean_loss(each, [Fraction(3)] * 3) == mean_loss(each, [Fraction(2)] * 3) == pytest.approx(sum(each) / 3)
    assert math.isnan(mean_loss([], []))


def test_data_that_ends_ends_training_and_what_was_learnt_is_saved(tmp_path: Path) -> None:
    training, _, kept = run(config_of(tmp_path, "data.name=mine.py:few", "data.passes=1"), tmp_path / "run")
    assert (len(kept.steps), training.trainer.ended) == (3, "the data has ended")
    assert (tmp_path / "run" / "checkpoints" / "step-00000003").is_dir()


def test_the_last_checkpoint_and_the_best_one_are_kept(tmp_path: Path) -> None:
    """Training goes uphill here, so that the first evaluation is the best."""
    settings = ["evaluate.every=1", "evaluate.name=mine.py:batches", "optimizer.arguments.maximize=true"]
    config = config_of(tmp_path, *settings, "checkpoint.every=1", "checkpoint.keep=1", "train.steps=4")
    _, _, kept = run(config, tmp_path / "run")
    losses = [loss for _, loss in kept.evaluations]
    assert losses == sorted(set(losses))
    assert {each.name for each in (tmp_path / "run" / "checkpoints").iterdir()} == {
        *("step-00000001", "step-00000004", "latest")
    }


def test_it_stops_early_when_evaluations_get_no_better(tmp_path: Path) -> None:
    settings = ["evaluate.every=1", "evaluate.name=mine.py:few", "evaluate.patience=2", "train.steps=20"]
    config = config_of(
        tmp_path, *settings, "loss.name=mine.py:worse", "checkpoint.every=1", "optimizer.arguments.lr=-0.0"
    )
    training, _, kept = run(config, tmp_path / "run")
    assert training.trainer.ended.startswith("no better evaluation than ")
    assert len(kept.steps) == 3
    assert [step for step, _ in kept.evaluations] == [1, 2, 3]
    assert {loss for _, loss in kept.evaluations} == {kept.evaluations[0][1]}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_sigterm_and_ctrl_c_save_first_and_the_same_command_goes_on(
    tmp_path: Path, programs: Programs, number: int, code: int
) -> None:
    file = write(tmp_path, text=GPT)
    words = ("--steps", "1000000", "--set", "run.tensorboard=false", "--set", "run.report=false")
    with programs.start("gapless", "train", str(file), *words, cwd=tmp_path) as program:
        program.until_it_says("step ")
        program.send_signal(number)
        ended, out, err = program.ended()
    assert ended == code, err
    saved = int(os.readlink(tmp_path / "runs" / "mine" / "checkpoints" / "latest").removeprefix("step-"))
    if number == signal.SIGINT:
        assert (
            err == f"gapless: stopped after {saved} of 1000000 steps; the run is saved: the same command resumes it\n"
        )
    else:
        assert f"ended after step {saved} of 1000000: SIGTERM; the same command resumes it" in out
    config = read_config(file, QUIET).changed(steps=saved + 1)
    _, _, kept = run(config, tmp_path / "runs" / "mine")
    assert [step.number for step in kept.steps] == [saved + 1]


# -- precision, accumulation, learning rate ---------------------------------------------------------------------------


def test_accumulated_minibatches_are_one_plain_loop_over_all_their_microbatches(tmp_path: Path) -> None:
    config = config_of(tmp_path, "train.accumulate=2", "train.steps=1", "model.arguments.dropout=0.0")
    feed = make_feeds(config, {})[0]
    (x1, y1), (x2, y2) = next(feed), next(feed)
    model = build(config).model
    assert isinstance(model, torch.nn.Module)
    found = gapless.plain_step(
        model, torch.cat([x1, x2]), torch.cat([y1, y2]), microbatches=4, loss=F.cross_entropy, seed=7, step=0
    )
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.AdamW(model.parameters(), lr=0.01).step()
    _, weights, kept = run(config.changed(microbatches=2), tmp_path / "run")
    assert equal(weights, model.state_dict())
    assert kept.steps[0].loss == pytest.approx(float(found.loss), rel=1e-6)
    assert kept.steps[0].samples == 12


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains_and_goes_on(tmp_path: Path, precision: str) -> None:
    config = config_of(tmp_path, f"train.precision={precision}")
    _, whole, kept = run(config, tmp_path / "whole")
    assert all(math.isfinite(step.loss) for step in kept.steps)
    run(config.changed(steps=3), tmp_path / "parts")
    assert equal(whole, run(config, tmp_path / "parts")[1])
    assert [step.loss for step in kept.steps] != [step.loss for step in trained(config_of(tmp_path))]


def test_learning_rates_rise_and_fall_as_drawn(tmp_path: Path) -> None:
    for name, expected in (
        ("constant", [0.005, 0.01, 0.01, 0.01]),
        ("linear", [0.005, 0.01, 0.0075, 0.005]),
        ("cosine", [0.005, 0.01, 0.0085355, 0.005]),
    ):
        settings = [f"scheduler.name={name}", "scheduler.warmup=1", "scheduler.steps=5", "train.steps=4"]
        rates = [step.rate for step in trained(config_of(tmp_path, *settings))]
        assert rates == pytest.approx(expected, rel=1e-4), name
    torch_s = ["scheduler.name=StepLR", "scheduler.arguments={ step_size = 1, gamma = 0.5 }", "train.steps=3"]
    assert [step.rate for step in trained(config_of(tmp_path, *torch_s))] == pytest.approx([0.01, 0.005, 0.0025])


@pytest.mark.slow
def test_a_model_of_hugging_face_trains_with_its_own_loss(tmp_path: Path) -> None:
    tiny = '{ model_type = "gpt2", n_layer = 2, n_embd = 8, n_head = 2, n_positions = 16, vocab_size = 256 }'
    settings = ["model.name=huggingface", f"model.arguments={tiny}", "train.steps=2", "evaluate.every=2"]
    config = config_of(tmp_path, *settings, "evaluate.batches=1", text=GPT)
    _, _, kept = run(config, tmp_path / "run")
    assert len(kept.steps) == 2
    assert kept.steps[0].tokens == 32
    assert kept.evaluations[0][1] == pytest.approx(kept.steps[0].loss, abs=0.5)


# -- what it leaves ---------------------------------------------------------------------------------------------------


def test_the_folder_tells_all_of_it(tmp_path: Path) -> None:
    config = config_of(tmp_path, "run.tensorboard=false", "run.report=true", "run.timeline=2")
    training = run(config, tmp_path / "run")[0]
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"run.json", "metrics.jsonl", "timelines.json", "checkpoints", "report.html"}
    said = json.loads((tmp_path / "run" / "run.json").read_text())
    assert said["config"]["train"]["clip"] == 0.5
    assert said["environment"]["torch"] == torch.__version__
    lines = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert [line["step"] for line in lines if "bubble" in line] == [4, 6]
    assert [line["memory"]["process"] > 2**20 for line in lines if "memory" in line] == [True, True]
    assert lines[-1]["ended"] == "all steps are done"
    assert len(training.folder.timelines()) == 2
    assert training.folder.timelines()[0].schedule == training.pipe.schedule


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_finds_its_events(tmp_path: Path) -> None:
    run(config_of(tmp_path, "run.tensorboard=true"), tmp_path / "run")
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


def test_what_is_not_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"run\.wandb is 'p', but wandb is not installed: pip install wandb"):
        run(config_of(tmp_path, "run.wandb=p"), tmp_path / "run")


def test_the_loop_that_people_may_copy_has_at_most_100_lines() -> None:
    import inspect

    from gapless.train.run.trainer import Trainer

    code = [
        line for line in inspect.getsource(Trainer).splitlines() if line.strip() and not line.strip().startswith("#")
    ]
    body = code[code.index("    def stop(self, why: str) -> None:") :]
    assert len(body) <= 100
    assert make_trainer.__annotations__["return"] is Trainer  # what `gapless train` runs


def held() -> tuple[int, int, int]:
    """Memory in pages, file descriptors and threads of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages, len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_10_000_steps_take_no_more_memory_files_or_threads_than_1_000(tmp_path: Path) -> None:
    """With everything that `gapless train` does beside a step: metrics, TensorBoard, timelines, checkpoints."""
    settings = ["run.tensorboard=true", "run.timeline=100", "checkpoint.every=500", "model.arguments.depth=3"]
    config = config_of(tmp_path, *settings, "data.arguments.count=1000").changed(steps=10_000)
    seen: dict[int, tuple[int, int, int]] = {}

    class Looks(Kept):
        def on_step(self, trainer: Any, step: Any) -> None:
            if step.number % 1000 == 990:
                seen[step.number] = held()

    with prepared(config, RunFolder(tmp_path / "run"), Ranks()) as training:
        training.add(Looks())
        training.run()
    first, last = seen[1990], seen[9990]
    assert last[1:] == first[1:], seen
    assert (last[0] - first[0]) * os.sysconf("SC_PAGE_SIZE") < 8 * 2**20, seen
    print(seen)


# -- refusals ---------------------------------------------------------------------------------------------------------


def below(folder: Path) -> set[str]:
    """Everything there, but for what Python keeps of modules."""
    return {str(each.relative_to(folder)) for each in folder.rglob("*") if "__pycache__" not in each.parts}


@pytest.mark.parametrize("there", [False, True])
def test_a_refused_run_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], there: bool
) -> None:
    config_of(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no-checkpoint").mkdir()
    if there:
        (tmp_path / "runs" / "mine").mkdir(parents=True)
        (tmp_path / "runs" / "mine" / "notes.txt").write_text("my own")
    before = below(tmp_path)
    refused = [
        ["missing.toml"],
        ["--resume"],
        ["--resume", "missing"],
        ["--resume", "no-checkpoint"],
        ["--plan", "missing.json"],
        ["--folder", "mine.toml/run"],
        ["--schedule", "2bw"],
    ]
    settings = [
        "train.steps=0",
        "train.colour=1",
        "model.name=mine.py:missing",
        "model.name=mine.py:failing",
        "model.name=missing.py:make",
        "data.name=mine.py:nothing",
        "data.name=mine.py:triples",
        "data.name=text",
        "evaluate.every=1",
        'pipeline.devices=["cuda:900"]',
        "pipeline.microbatches=9",
        "pipeline.partition=[1, 2]",
        "pipeline.plan=missing.json",
        "loss.name=mine.py:missing",
        "optimizer.arguments={ lr = -1 }",
        "scheduler.name=StepLR",
        "run.wandb=project",
    ]
    monkeypatch.setitem(sys.modules, "wandb", None)
    for words in [*refused, *(["--set", setting] for setting in settings)]:
        files = [] if words[0].endswith(".toml") else ["mine.toml"]
        assert main(["train", *files, *words, "--set", "run.tensorboard=false"]) == 2, words
        assert below(tmp_path) == before, words
    capsys.readouterr()


def test_a_run_that_goes_on_and_is_refused_stays_as_it_was(tmp_path: Path) -> None:
    run(config_of(tmp_path), tmp_path / "run")
    before = {name: (tmp_path / "run" / name).read_bytes() for name in ("run.json", "metrics.jsonl")}
    with pytest.raises(GaplessError):
        run(config_of(tmp_path, "pipeline.partition=[1, 2]"), tmp_path / "run")
    assert before == {name: (tmp_path / "run" / name).read_bytes() for name in before}
