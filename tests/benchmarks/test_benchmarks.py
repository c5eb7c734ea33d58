"""Every benchmark runs to its end in a small size. No test asserts a speed."""

import inspect
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import BENCHMARKS, benchmark_module, emulated
from benchmarks.runner.command import main
from benchmarks.scale import sizes

from .processes import below, needs_proc

pytestmark = needs_proc
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture(autouse=True)
def _nothing_is_left_running(server_of_ranks: None) -> Iterator[None]:
    processes, threads = below(), set(threading.enumerate())
    yield
    assert below() <= processes
    assert {thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"} <= threads  # torch.compile's


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    """What the command stores, and what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        assert main([*words, "--json", str(file)]) == 0
        found = json.loads(file.read_text())["found"]
    printed = capsys.readouterr()
    assert printed.err == ""
    assert found["benchmark"] == words[0]
    return found, printed.out


def test_emulated_compares_with_the_bound_and_with_torch(capsys: pytest.CaptureFixture[str]) -> None:
    found, report = bench(capsys, "emulated", "-K", "2", "-M", "4", "--milliseconds", "1", "--rounds", "1")
    rows = {(row["by"], row["schedule"]): row for row in found["rows"]}
    ours = [("gapless", name) for name in ("1f1b", "zb-h1", "interleaved", "zb-v")]
    theirs = [("torch", name) for name in ("1f1b", "interleaved", "zb-v")]
    if torch.__version__ < "2.13":  # which can't split the backward of a custom function
        assert found["refused"].keys() == {"zb-v"}
        theirs.pop()
    assert list(rows) == [*ours, *theirs]
    # 3 ms of work per microbatch and device; 1f1b is idle for K - 1 more microbatches.
    assert rows["gapless", "1f1b"]["bound"] == pytest.approx(0.015)
    assert rows["torch", "1f1b"]["bound"] == pytest.approx(0.015)
    for by, name in theirs:
        assert rows[by, name]["bound"] == pytest.approx(rows["gapless", name]["bound"])
    for row in rows.values():
        assert 0 < row["useful"] <= row["efficiency"]
        assert row["efficiency"] == pytest.approx(row["bound"] / row["seconds"])
    assert "faster than torch's best" in report
    assert "backwards fused" in report  # of zb-v: the bound is that of the actions as run


def test_emulated_runs_without_the_peer_and_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["-K", "2", "-M", "2", "--milliseconds", "1", "--rounds", "1"]
    assert main(["emulated", "--schedules", "gpipe,pipedream,2bw", *sizes, "--no-peer"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 emulated devices, 2 microbatches, 1 ms for each F, I and W of a device; medians of 1"
    assert lines[2].split() == ["schedule", "by", "stages", "step", "bound", "efficiency", "useful"]
    assert [line.split()[:3] for line in lines[3:]] == [
        [name, "gapless", "2"] for name in ("gpipe", "pipedream", "2bw")
    ]


def test_stopping_in_the_middle_of_a_round_leaves_nothing_behind() -> None:
    def stop(line: str) -> None:
        if line.startswith("round 1"):
            raise KeyboardInterrupt

    sizes: dict[str, Any] = {"devices": 2, "microbatches": 2, "milliseconds": 1.0, "rounds": 1, "size": 1}
    with pytest.raises(KeyboardInterrupt):
        emulated.run(schedules=("1f1b",), **sizes, peer=True, progress=stop)


def test_overhead_checks_the_bits_before_it_compares(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--depth", "1", "--width", "16", "--batch", "2", "--length", "4", "--microbatches", "2"]
    found, report = bench(capsys, "overhead", *sizes, "--rounds", "1")
    assert found["same_bits"] is True
    assert found["ratio"] == pytest.approx(found["seconds"] / found["plain_seconds"])
    assert "the same bits" in report


def test_tiny_compares_with_torch(capsys: pytest.CaptureFixture[str]) -> None:
    found, report = bench(capsys, "tiny", "-M", "2", "--steps", "2", "--rounds", "1")
    assert found["ratio"] == pytest.approx(found["torch_seconds"] / found["seconds"])
    assert "faster than torch's 1F1B by" in report


def test_split_compares_three_ways(capsys: pytest.CaptureFixture[str]) -> None:
    found, report = bench(capsys, "split", "--times", "2", "--rounds", "2")
    ways = [(row["block"], row["by"]) for row in found["rows"]]
    assert ways == [(block, by) for block in ("mlp", "gpt") for by in ("plain", "gapless", "torch")]
    assert report.count("F + I + W") == 4


def test_scale_counts_per_action(capsys: pytest.CaptureFixture[str]) -> None:
    found, report = bench(capsys, "scale", "--smallest", "2", "--largest", "4")
    assert [(row["devices"], row["microbatches"], row["actions"]) for row in found["rows"]] == [
        (2, 8, 48),
        (4, 16, 192),
    ]
    assert all(row["peak_bytes"] > 1_000_000 for row in found["rows"])
    assert "4 times the actions" in report


def test_scale_takes_four_times_as_many_microbatches_but_at_most_1024() -> None:
    assert sizes(64, 1024) == [(64, 256), (128, 512), (256, 1024), (512, 1024), (1024, 1024)]


def test_timeline_runs_with_and_without_recording_and_lays_prediction_and_record_side_by_side(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "both.html"
    words = ["timeline", "--schedule", "zb-v", "-K", "2", "-M", "2", "--steps", "1", "--rounds", "1"]
    found, report = bench(capsys, *words, "--html", str(page))
    assert found["rounds"].keys() == {"gapless", "recorded"}
    assert found["difference"] == pytest.approx(found["predicted"] / found["measured"] - 1)
    assert "per step" in report
    assert str(page) in report
    html = page.read_text("utf-8")
    assert '"predicted"' in html
    assert '"measured"' in html


def test_saving_says_what_a_save_adds_to_a_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ["--depth", "1", "--width", "8", "--samples", "1", "--length", "4", "-M", "2"]
    found, report = bench(capsys, "saving", *sizes, "--rounds", "2", "--folder", str(tmp_path))
    assert len(found["stalls"]) == 2
    assert found["size"] > 3 * found["weights"]
    assert "of a step (target: below +5.0%)" in report


@pytest.mark.slow
def test_compile_compares_with_the_eager_step(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--depth", "1", "--width", "8", "--vocab", "5", "--samples", "1", "--length", "4", "-M", "2"]
    words = ["--dropout", "0.1", "--backend", "aot_eager", "--steps", "1", "--rounds", "1"]
    found, report = bench(capsys, "compile", *sizes, *words)
    assert found["compile_seconds"] > 0
    assert "faster than eager layers by" in report


def test_staleness_trains_in_every_way_on_equal_samples(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page, sizes = tmp_path / "curves.html", ["-K", "2", "--steps", "5", "--batch", "2", "--width", "4"]
    found, report = bench(capsys, "staleness", *sizes, "--seeds", "2", "--html", str(page))
    rows = {row["way"]: row for row in found["rows"]}
    corrected = ["spectrain", "lr by delay", "asp", "nesterov", "sync, nesterov's optimizer"]
    assert list(rows) == ["sync", "pipedream", "pipedream, vertical", "2bw", *corrected]
    assert found["minibatches"] == [0, 1, 2, 3, 4]
    assert len({tuple(row["runs"][1][:1]) for row in rows.values()} - {rows["2bw"]["runs"][1][0]}) <= 2  # one start
    assert all(len(row["runs"]) == len(row["held_out"]) == 2 for row in rows.values())
    assert rows["pipedream"]["held_out"] != rows["sync"]["held_out"]
    assert "0 to 1" in report
    assert page.read_text("utf-8").count("<figure>") == len(rows)


def test_staleness_says_which_ways_diverge(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["-K", "2", "--steps", "12", "--batch", "2", "--width", "4", "--seeds", "1"]
    found, report = bench(capsys, "staleness", *sizes, "--optimizer", "sgd", "--lr", "10")
    assert {row["way"] for row in found["rows"] if row["held_out"] == [None]} >= {"pipedream"}
    assert "diverged" in report


def test_replicas_run_as_planned(capsys: pytest.CaptureFixture[str]) -> None:
    found, report = bench(capsys, "replicas", "--devices", "4", "--milliseconds", "2", "--rounds", "1")
    assert (found["plan"], found["partition"]) == ("1-3", [1, 7])
    assert found["predicted"] == pytest.approx(0.002, rel=0.01)
    assert found["ratio"] == pytest.approx(found["seconds"] / found["predicted"])
    assert found["ratio"] > 0.97  # nothing is quicker than the work of its slowest stage
    assert "predicted 2.0 ms" in report


def test_the_help_lists_every_benchmark_and_loads_no_torch() -> None:
    program = (
        "import sys; from benchmarks.runner.command import main; code = main(sys.argv[1:]); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    for words in (["--help"], []):
        run = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        assert "example: python -m benchmarks emulated" in run.stdout
        assert all(f"\n  {name} " in run.stdout for name in BENCHMARKS)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_options_of_a_benchmark_are_the_parameters_of_its_run(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    for parameter in inspect.signature(benchmark_module(name).run).parameters.values():
        option = f"--no-{parameter.name}" if parameter.default is True else f"--{parameter.name}"
        assert option in shown or parameter.name == "progress"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("emulated --schedules 2f2b", "there is no schedule named '2f2b'"),
        ("emulated --devices 0", "'0' is not a whole number from 1 to 1,000,000"),
        ("emulated --milliseconds nan", "'nan' is not a number from 0.001 to 60,000"),
        ("emulated --schedules 2bw --no-peer -K 4 -M 2", "2bw needs at least as many microbatches as devices"),
        ("scale --largest 2", "--smallest 16 is above --largest 2"),
        ("staleness --optimizer lion", "there is no optimizer 'lion': it is one of adam, sgd"),
        ("staleness --batch 7", "2bw cuts it into a microbatch for each of 8 devices"),
        ("timeline --html none/a", "argument --html: there is no folder none: make it first; `python -m benchmarks"),
        ("throughput --devices 2,x", "--devices 2,x is not a list of numbers above 0"),
        ("throughput --microbatches inf", "--microbatches inf is not a list of numbers above 0"),
        ("throughput --devices 1,2", "give 2 or more"),
        ("largest --layers 4", "a multiple of 3 layers"),
        ("breakdown --width 6", "width is 6, but it must be a multiple of 4"),
        ("overhead --width 130", "width is 130, but it must be a multiple of 4, the number of heads"),
        ("split --width 6", "width is 6, but it must be a multiple of 4"),
        ("saving --width 200", "width is 200, but it must be a multiple of 3"),
        ("compile --width 642", "width is 642, but it must be a multiple of 5"),
        ("matrix -K 2,x", "--devices 2,x is not a list of numbers above 0"),
        ("matrix -M 1.5", "--microbatches 1.5 is not a list of numbers above 0"),
        ("plan --parts speed", "there is no part 'speed': it is one of prediction, cuts, choice"),
        pytest.param("plan --fit", "--fit measures on an NVIDIA GPU, and there is none here", marks=without_gpu),
        ("all --only speed", "there is no part 'speed': it is one of emulated"),
        ("nothing", "invalid choice: 'nothing'"),
        ("tiny --step 3", "'--step' is not understood; did you mean --steps?"),
    ],
)
def test_bad_input_is_one_sentence(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gapless: ")
    assert message in error
    assert error.count("\n") == 1


def test_under_torchrun_it_refuses_to_do_all_the_work_once_per_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert main(["tiny"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "runs in one process, but torchrun started 2, and each would do the whole job" in err
    assert "docs/cluster.md" in err
