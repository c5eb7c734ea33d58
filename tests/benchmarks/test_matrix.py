"""Many sizes, kept cell by cell; a win is a matter of intervals."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import matrix
from benchmarks.runner.command import main

ROW: dict[str, Any] = {
    "cell": "K = 8, M = 16, 5 ms",
    "best": {"gapless": "gapless zb-v", "gapless, ranks": "gapless, ranks zb-v", "torch": "torch 1f1b"},
    "rounds": {"gapless zb-v": [1.0, 1.2], "gapless, ranks zb-v": [1.0, 1.5], "torch 1f1b": [1.4, 2.0]},
    "refused": {},
    "first": {},
}


def test_a_cell_is_won_if_no_round_overlaps() -> None:
    result = matrix.shown([ROW], 1, {"torchgpipe": "it is not installed"}, {})
    assert matrix.won(ROW, "gapless")
    assert not matrix.won(ROW, "gapless, ranks")
    shown = {figure.name: figure for figure in result.figures}
    assert shown["cells won of 1, gapless"].value == 1
    assert shown["K = 8, M = 16, 5 ms, gapless: faster by"].low == pytest.approx(1.4)
    assert "gapless, ranks: 0 of 1 cells won" in result.text
    assert "left out: torchgpipe: it is not installed" in result.text


@pytest.mark.slow
def test_cells_that_are_there_are_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cells.json"
    words = ["-K", "2", "-M", "2,4", "--times", "1", "--rounds", "1", "--keep", str(file), "--json"]
    assert main(["matrix", *words]) == 0
    first = json.loads(capsys.readouterr().out)
    assert [row["cell"] for row in first["rows"]] == ["K = 2, M = 2, 1 ms", "K = 2, M = 4, 1 ms"]
    assert {"gapless", "gapless, ranks", "torch"} <= first["rows"][0]["best"].keys()
    assert main(["matrix", *words]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == first["rows"]
