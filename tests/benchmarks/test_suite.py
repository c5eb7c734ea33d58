"""`python -m benchmarks all`: every part is kept as soon as it is there, and a later run says what got slower."""

import json
from pathlib import Path

import pytest

from benchmarks import BENCHMARKS, ENTRIES
from benchmarks.runner import all as suite
from benchmarks.runner.command import main
from benchmarks.runner.findings import BenchmarkResult, Figure, of_rounds
from benchmarks.runner.outcome import Outcome, read, slower
from benchmarks.runner.outcome import outcome as made_outcome
from benchmarks.runner.parameters import command_of, parameters_of, parsed
from benchmarks.runner.summary_page import render
from gapless.errors import ConfigError

KEYS = ["overhead", "split"]


def test_all_runs_keeps_and_shows_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, results = tmp_path / "report.html", tmp_path / "results"
    words = ["all", "--quick", "--only", "split,overhead,gpu", "--html", str(page), "--results", str(results)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "split: done" in printed
    assert "gpu: left out, the benchmark gpu needs an NVIDIA GPU" in printed
    shown = page.read_text("utf-8")
    assert "F + I + W to a plain F + B, mlp, torch" in shown
    assert "needs an NVIDIA GPU" in shown
    assert "python -m benchmarks split --times 2 --rounds 2" in shown
    assert "http" not in shown.replace("http-equiv", "")  # nothing is loaded from elsewhere
    stored = read(results / "0001" / "split.json")
    assert (stored.name, stored.skipped) == ("split", "")
    assert stored.environment.keys() == {"cpu", "cores", "os", "python", "torch", "gapless"}
    figure = stored.figures[0]
    assert figure.low is not None
    assert figure.high is not None
    assert figure.low <= figure.value <= figure.high
    assert str(tmp_path) not in (results / "0001" / "split.json").read_text()


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    runs, ran = suite.Runs(tmp_path), list[str]()
    folder, goes_on = runs.open(KEYS, quick=True)
    assert not goes_on

    def stop(line: str) -> None:
        if line.startswith("[2 of 2]"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        suite.run_all(folder, KEYS, quick=True, progress=stop, done=lambda key, _: ran.append(key))
    assert list(suite.stored(folder)) == ran == ["overhead"]
    assert runs.open(["split"], quick=True)[1] is False  # of other parts is another run
    again, goes_on = suite.Runs(tmp_path / "other").open(KEYS, quick=True)
    assert not goes_on
    (folder / "overhead.json").rename(again / "overhead.json")
    assert suite.Runs(tmp_path / "other").open(KEYS, quick=True) == (again, True)
    suite.run_all(again, KEYS, quick=True, progress=lambda _: None, done=lambda key, _: ran.append(key))
    assert ran == KEYS
    following, goes_on = suite.Runs(tmp_path / "other").open(KEYS, quick=True)
    assert (following.name, goes_on) == ("0002", False)
    assert suite.Runs(tmp_path / "other").before(following) == again


def outcome(*figures: Figure, cpu: str = "one") -> Outcome:
    return Outcome("split", "python -m benchmarks split", "2026-01-01 00:00:00", {"cpu": cpu, "cores": 2}, figures)


def test_slower_is_what_lies_wholly_on_the_worse_side() -> None:
    before = outcome(
        of_rounds("step", [1.0, 1.2]), of_rounds("gain", [2.0, 2.2], "x", "more"), Figure("once", 1.0, "s")
    )
    near = outcome(of_rounds("step", [1.1, 1.9]), of_rounds("gain", [1.0, 2.0], "x", "more"), Figure("once", 9.0, "s"))
    worse = outcome(of_rounds("step", [1.3, 1.9]), of_rounds("gain", [1.8, 1.9], "x", "more"))
    fine = slower({"split": before}, {"split": near})
    assert fine.worse == []
    assert fine.verdict("0001") == "nothing got slower than in 0001, of 2 figures compared"
    found = slower({"split": before}, {"split": worse})
    assert found.verdict("0001") == "2 of 2 figures got slower than in 0001"
    lines = [str(each) for each in found.worse]
    assert lines[0] == "split, step: 1600 ms (1300 ms to 1900 ms), it was 1100 ms (1000 ms to 1200 ms)"
    assert len(lines) == 2
    assert lines[0] in render({"split": worse}, found, quick=False)


def test_what_could_not_be_compared_is_said() -> None:
    """It said that nothing got slower, also where nothing was compared."""
    before = {"split": outcome(of_rounds("step", [1.0, 1.2]))}
    elsewhere = slower(before, {"split": outcome(of_rounds("step", [9.0, 9.9]), cpu="other")})
    said = "nothing could be compared with the run before: it ran on another machine"
    assert (elsewhere.worse, elsewhere.verdict("the run before")) == ([], said)
    assert f'<p class="warn">{said.capitalize()}.</p>' in render(before, elsewhere, quick=False)
    more = outcome(of_rounds("step", [1.0]), of_rounds("gain", [1.0], "x", "more"))
    assert slower(before, {"split": more, "tiny": more}).verdict("0001") == (
        "nothing got slower than in 0001, of 1 figure compared; 3 of 4 could not be compared: "
        "1 (the figure is new), 2 (the part was not run before)"
    )
    assert slower(before, {}).verdict("0001") == "nothing could be compared with 0001: there are no figures"


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"schema": 1, "name": "split"}))
    with pytest.raises(ConfigError, match="is not a stored result"):
        read(file)
    file.write_text(json.dumps({"schema": 99}))
    with pytest.raises(ConfigError, match="another version"):
        read(file)


def test_what_can_not_be_compared_is_said_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["all", "--quick", "--only", "split", "--results", str(tmp_path / "results"), "--compare"]
    assert main([*words, str(tmp_path / "none")]) == 2
    told = capsys.readouterr()
    assert "none to compare with: give the folder of a run" in told.err
    assert "split" not in told.out
    (tmp_path / "split.json").write_text(json.dumps({"schema": 99}))
    assert main([*words, str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert "was stored by another version of gapless" in told.err
    assert "split: done" not in told.out


def test_every_benchmark_is_in_the_suite_and_tells_its_command() -> None:
    assert {entry.benchmark for entry in ENTRIES.values()} == set(BENCHMARKS)
    for key, entry in ENTRIES.items():
        for words in (entry.words, entry.quick):
            given, as_json = parsed(entry.benchmark, words.split())
            assert given.keys() == parameters_of(entry.benchmark).keys(), key
            assert as_json is False
    told = command_of("emulated", {"torchrun": True, "peer": False, "milliseconds": 20.0, "schedules": ("a", "b")})
    assert told == "python -m benchmarks emulated --schedules a,b --milliseconds 20 --torchrun --no-peer"


def test_where_files_were_written_is_not_stored(tmp_path: Path) -> None:
    found = made_outcome("matrix", {"keep": tmp_path, "rounds": 2}, BenchmarkResult({"rows": []})).found
    assert found == {"benchmark": "matrix", "keep": None, "rounds": 2, "rows": []}


def test_names_from_files_are_escaped_on_the_page() -> None:
    made = outcome(of_rounds("<script>alert(1)</script>", [1.0]))
    assert "<script" not in render({"<b>": made}, None, quick=False)


def test_a_benchmark_stores_its_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "split.json"
    assert main(["split", "--times", "1", "--rounds", "1", "--json", str(file)]) == 0
    stored = read(file)
    assert stored.command == "python -m benchmarks split --times 1 --rounds 1"
    assert stored.report in capsys.readouterr().out
