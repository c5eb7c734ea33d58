"""Every benchmark runs to its end in a small size. No test asserts a speed."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from gapless.bench import BENCHMARKS, emulated
from gapless.bench.scale import sizes
from gapless.cli import main

from .processes import below, needs_proc

pytestmark = needs_proc


@pytest.fixture(autouse=True)
def _nothing_is_left_running() -> Iterator[None]:
    processes, threads = below(), set(threading.enumerate())
    yield
    assert below() <= processes
    assert {thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"} <= threads  # torch.compile's


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    """What the command prints as JSON, and the report of the same figures."""
    assert main(["bench", *words, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    found: dict[str, Any] = json.loads(printed.out)
    assert found["benchmark"] == words[0]
    report: str = import_module(f"gapless.bench.{words[0]}").report(found)
    return found, report


def test_emulated_compares_with_the_bound_and_with_torch(capsys: pytest.CaptureFixture[str]) -> None:
    found, report = bench(capsys, "emulated", "-K", "2", "-M", "4", "--milliseconds", "1", "--rounds", "1")
    rows = {(row["by"], row["schedule"]): row for row in found["rows"]}
    ours = [("gapless", name) for name in ("1f1b", "zb-h1", "interleaved", "zb-v")]
    assert list(rows) == [*ours, *(("torch", name) for name in ("1f1b", "interleaved", "zb-v"))]
    # 3 ms of work per microbatch and device; 1f1b is idle for K - 1 more microbatches.
    assert rows["gapless", "1f1b"]["bound"] == pytest.approx(0.015)
    assert rows["torch", "1f1b"]["bound"] == pytest.approx(0.015)
    assert rows["torch", "zb-v"]["bound"] == pytest.approx(rows["gapless", "zb-v"]["bound"])
    for row in rows.values():
        assert 0 < row["useful"] <= row["efficiency"]
        assert row["efficiency"] == pytest.approx(row["bound"] / row["seconds"])
    assert found["faster"] > 0
    assert "faster than torch's best" in report
    assert "backwards fused" in report  # of zb-v: the bound is that of the actions as run


def test_emulated_runs_without_the_peer_and_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["-K", "2", "-M", "2", "--milliseconds", "1", "--rounds", "1"]
    assert main(["bench", "emulated", "--schedules", "gpipe,1f1b", *sizes, "--no-peer"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 emulated devices, 2 microbatches, 1 ms for each F, I and W of a device; medians of 1"
    assert lines[2].split() == ["schedule", "by", "stages", "step", "bound", "efficiency", "useful"]
    assert [line.split()[:3] for line in lines[3:]] == [["gpipe", "gapless", "2"], ["1f1b", "gapless", "2"]]


def test_stopping_in_the_middle_of_a_round_leaves_nothing_behind() -> None:
    def stop(line: str) -> None:
        if line.startswith("round 1"):
            raise KeyboardInterrupt

    sizes: dict[str, Any] = {"devices": 2, "microbatches": 2, "milliseconds": 1.0, "rounds": 1, "size": 1}
    with pytest.raises(KeyboardInterrupt):
        emulated.run(schedules=["1f1b"], **sizes, peer=True, progress=stop)


def test_overhead_checks_the_bits_before_it_compares(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--depth", "1", "--width", "16", "--batch", "2", "--length", "4", "--microbatches", "2"]
    found, report = bench(capsys, "overhead", *sizes, "--rounds", "1")
    assert found["same_bits"] is True
    assert found["ratio"] > 0
    assert "the same bits" in report


def test_tiny_compares_with_torch(capsys: pytest.CaptureFixture[str]) -> None:
    found, report = bench(capsys, "tiny", "-M", "2", "--steps", "2", "--rounds", "1")
    assert found["ratio"] == pytest.approx(found["torch_seconds"] / found["seconds"])
    assert "faster by" in report


def test_split_compares_three_ways(capsys: pytest.CaptureFixture[str]) -> None:
    found, report = bench(capsys, "split", "--times", "2", "--rounds", "2")
    assert [row["block"] for row in found["rows"]] == ["mlp", "gpt"]
    for row in found["rows"]:
        assert row["seconds"].keys() == row["forward"].keys() == {"plain", "gapless", "torch"}
        assert row["ratio"] > 0
        assert row["torch_ratio"] > 0
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


@pytest.mark.parametrize("model", ["emulated", "gpt"])
def test_prediction_lays_both_timelines_side_by_side(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "both.html"
    words = f"prediction --model {model} -K 2 -M 2 --milliseconds 1 --rounds 1 --schedules 1f1b,zb-v".split()
    found, report = bench(capsys, *words, "--html", str(page))
    assert [row["schedule"] for row in found["rows"]] == ["1f1b", "zb-v"]
    for row in found["rows"]:
        assert row["predicted"] > 0
        assert row["measured"] > 0
    html = page.read_text("utf-8")
    assert "1f1b, predicted" in html
    assert "zb-v, measured" in html
    assert str(page) in report


def test_timeline_runs_with_and_without_recording(capsys: pytest.CaptureFixture[str]) -> None:
    found, report = bench(capsys, "timeline", "-K", "2", "-M", "2", "--steps", "1", "--rounds", "1")
    assert found["rounds"].keys() == {"recorded", "not recorded"}
    assert "per step" in report


def test_compile_compares_with_the_eager_step(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--depth", "1", "--width", "8", "--vocab", "5", "--samples", "1", "--length", "4", "-M", "2"]
    words = ["--dropout", "0.1", "--backend", "aot_eager", "--steps", "1", "--rounds", "1"]
    found, report = bench(capsys, "compile", *sizes, *words)
    assert found["ratio"] > 0
    assert found["compile_seconds"] > 0
    assert "faster by" in report


def test_the_help_lists_every_benchmark_and_loads_no_torch() -> None:
    program = (
        "import sys; from gapless.cli import main; code = main(sys.argv[1:]); sys.exit(code or 'torch' in sys.modules)"
    )
    for words in (["bench", "--help"], ["bench"], ["bench", "emulated", "--help"]):
        run = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        assert "example: gapless bench emulated" in run.stdout
        if words[-1] != "--help" or len(words) == 2:
            assert all(f"\n    {name}" in run.stdout for name in BENCHMARKS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("emulated --schedules 2f2b", "there is no schedule named '2f2b'"),
        ("emulated --devices 0", "'0' is not a whole number from 1 to 1,000,000"),
        ("emulated --milliseconds nan", "'nan' is not a time between 0 and 60,000 ms"),
        ("emulated --schedules pipedream --no-peer -K 2", "updates weights on its way"),
        ("scale --largest 2", "--smallest 16 is above --largest 2"),
        ("nothing", "invalid choice: 'nothing'"),
    ],
)
def test_bad_input_is_one_sentence(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gapless: ")
    assert message in error
    assert error.count("\n") == 1
