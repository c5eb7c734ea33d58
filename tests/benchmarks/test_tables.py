"""GPipe's throughput, the measured breakdown, and the docs that are made from stored results."""

import json
from pathlib import Path

import pytest

from benchmarks.gpipe import breakdown, throughput
from benchmarks.runner import docs_tables
from benchmarks.runner.findings import Table, of_rounds
from benchmarks.runner.outcome import Outcome, read
from benchmarks.runner.rounds import best

DOCS = Path(__file__).parents[2] / "docs"


def test_throughput_stands_beside_the_published_numbers() -> None:
    fast, slow = throughput.run(milliseconds=8, devices=("2",), microbatches=("1", "4"), rounds=1).tables
    assert [row[:3] for row in fast.rows][:2] == [("AmoebaNet-D", "2", "1"), ("AmoebaNet-D", "2", "4")]
    assert [row[3] for row in fast.rows if row[2] == "1"] == ["1.00", "1.00"]
    assert [row[5] for row in fast.rows][:2] == ["1", "1.07"]
    assert len(slow.rows) == 2


def test_our_best_is_told_beside_torch_s_best_and_torchgpipe_is_not_torch() -> None:
    steps = {"copies": 1.0, "gapless, ranks zb-v": 3.0, "gapless, one process 1f1b": 2.0, "torch 1f1b": 3.0}
    steps |= {"torch zb-v": 2.5, "torchgpipe gpipe": 0.5}
    verdict = "gapless, one process 1f1b is faster than torch's best (torch zb-v) by 1.25x"
    assert best({way: [step] for way, step in steps.items()})["verdict"] == (verdict,)
    assert best({"gapless, ranks zb-v": [1.0]})["verdict"] == ()  # no peer ran


def test_the_parts_of_a_step_add_up_to_it() -> None:
    result = breakdown.run(width=16, depth=2, devices=2, milliseconds=1, rounds=2)
    rows = result.found["rows"]
    for row in rows:
        for parts, step in zip(row["parts"], row["steps"], strict=True):
            assert sum(parts.values()) == pytest.approx(step)
            assert all(part >= 0 for part in parts.values())
    recomputed = {row["schedule"]: row["parts"][0]["recompute"] for row in rows[:3]}
    assert recomputed["gpipe"] > 0 == recomputed["1f1b"]
    assert "bubble" in result.text


def test_docs_have_what_the_stored_results_say(tmp_path: Path) -> None:
    machine: dict[str, str | int] = {"cpu": "one", "cores": 2, "os": "Linux", "torch": "2", "python": "3"}
    for name, tables in (("split", ()), ("largest", (Table("Sizes", ("a", "b"), [("1", "2")], "So it is."),))):
        figures = [of_rounds("step", [1.0, 2.0], meant="below 3")]
        made = Outcome(name, f"python -m benchmarks {name}", "2026-01-01 00:00:00", machine, figures, tables)
        made.write(tmp_path / f"{name}.json")
    file = tmp_path / "page.md"
    file.write_text(f"before\n{docs_tables.BEGIN}\nold\n{docs_tables.END}\nafter\n")
    assert docs_tables.main([str(file), str(tmp_path), "--check"]) == 1
    assert docs_tables.main([str(file), str(tmp_path)]) == 0
    assert docs_tables.main([str(file), str(tmp_path), "--check"]) == 0
    written = file.read_text()
    assert "| `python -m benchmarks split` | step | below 3 | 1500 ms | 1000 ms to 2000 ms |" in written
    assert "**Sizes**\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nSo it is." in written
    assert written.startswith("before\n")
    assert written.endswith("after\n")


def test_the_docs_are_made_from_the_stored_results() -> None:
    for page, folder in (("results.md", "bench"), ("memory.md", "memory")):
        checked = docs_tables.main([str(DOCS / page), str(DOCS / "results" / folder), "--check"])
        assert checked == 0, "make bench-tables"


def test_the_figure_of_the_readme_is_a_stored_one() -> None:
    """It said 1.42, measured on another machine, beside a link to a page that says 1.19. The page of benchmarks too."""
    figures = {figure.name: figure for figure in read(DOCS / "results" / "bench" / "emulated.json").figures}
    faster = figures["faster than torch's best by"].value
    assert f"**{faster:.2f} times faster**" in (DOCS / "benchmarks.md").read_text("utf-8")
    on_gpu = json.loads((DOCS / "results" / "bench" / "gpu-8-ranks.json").read_text("utf-8"))["found"]["faster"]
    assert f"With 8 ranks on one H200, gapless is **{on_gpu:.2f} times faster**" in (
        DOCS.parent / "README.md"
    ).read_text("utf-8")
