"""`gapless show`: the drawing, and the three forms for programs."""

import json
from pathlib import Path

import pytest

from gapless.schedule.action import Schedule
from gapless.schedule.recipes import make_schedule
from tests.cli.conftest import Command, Refusal


def test_text_is_one_line_per_device_and_nothing_else(gapless: Command) -> None:
    code, out, err = gapless("show 1f1b --devices 3 --microbatches 4 --format text")
    assert (code, err) == (0, "")
    assert out == (
        "0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3\n"
    )


def test_csv_and_json_are_the_same_schedule(gapless: Command) -> None:
    schedule = make_schedule("zb-v", devices=2, microbatches=3)
    assert gapless("show zb-v -K 2 -M 3 --format csv").out == schedule.csv()
    assert json.loads(gapless("show zb-v -K 2 -M 3 --format json").out) == schedule.to_json()
    assert json.loads(gapless("show zb-v -K 2 -M 3 --json").out) == schedule.to_json()


def test_the_grid_has_a_row_per_device_and_the_numbers_below(gapless: Command) -> None:
    code, out, err = gapless("show gpipe --devices 2 --microbatches 3")
    assert (code, err) == (0, "")
    assert out == (
        "0 F0 F1 F2 ·········B0--- B1--- B2---\n"
        "1 ···F0 F1 F2 B0--- B1--- B2---\n"
        "\n"
        "F forward  B backward  · idle\n"
        "makespan 12, bubble 25.0%, span bubble 25.0%, peak 3, 12 actions\n"
    )


def test_stages_are_named_where_a_device_has_several(gapless: Command) -> None:
    first, second, *_ = gapless("show zb-v -K 2 -M 1").out.splitlines()
    assert first == "0 0F0 ········3F0 3I0 3W0 ········0I0 0W0"
    assert second == "1 ····1F0 2F0 ········2I0 2W0 1I0 1W0"


@pytest.mark.parametrize("columns", [20, 40, 61, 80, 200])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved", "pipedream"])
def test_the_grid_fits_the_width(gapless: Command, monkeypatch: pytest.MonkeyPatch, name: str, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    drawn = gapless(f"show {name} --devices 12 --microbatches 40").out.split("\n\n")[0]
    lines = drawn.splitlines()
    assert all(len(line) <= columns for line in lines)
    assert [int(line.split()[0]) for line in lines[:12]] == list(range(12))
    assert len(lines) == 12 or lines[12].startswith("1 column = ")


def test_a_narrow_column_shows_what_takes_the_time(gapless: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    # An update that takes no time once stood where a backward of 2 was.
    monkeypatch.setenv("COLUMNS", "20")
    drawn = gapless("show pipedream --devices 2 --microbatches 40").out.split("\n\n")[0]
    assert "U" not in drawn


def test_there_is_no_colour_where_there_is_no_terminal(gapless: Command) -> None:
    assert "\x1b" not in gapless("show zb-h1").out


def test_passes_change_what_is_shown(gapless: Command) -> None:
    assert gapless("show gpipe -K 1 -M 1 --forward-only --format text").out == "0: 0F0\n"
    assert gapless("show gpipe -K 1 -M 1 --updates --format text").out == "0: 0F0 0B0 0U0\n"
    assert gapless("show gpipe -K 1 -M 2 --remat --format text").out == "0: 0F0 0F1 0R0 0B0 0R1 0B1\n"
    assert "0SEND_F0" in gapless("show gpipe --transfers --format text").out
    assert "I" in gapless("show 1f1b --split --format text").out
    assert "B" in gapless("show zb-v --fuse --format text").out


def test_a_file_is_shown_too(gapless: Command, tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0B0\n")
    assert gapless("show --format text", str(file)).out == "0: 0F0 0B0\n"


def test_a_wrong_file_is_refused_with_its_violations(gapless: Command, tmp_path: Path) -> None:
    # A backward on another device than its forward once was a KeyError in the recompute pass.
    file = tmp_path / "mine.txt"
    file.write_text("0: 0F0\n1: 0B0\n")
    code, out, err = gapless("show --remat early", str(file))
    assert (code, out) == (2, "")
    assert err == (
        "gapless: schedule mine has 1 violation:\n"
        "  0B0 is on device 1, but stage 0 has microbatch 0 on device 0\n"
        "    1: 0B0\n"
        "       ^^^\n"
    )


def test_pictures_are_written_and_standard_output_stays_the_result(gapless: Command, tmp_path: Path) -> None:
    page, picture, trace = tmp_path / "a.html", tmp_path / "a.svg", tmp_path / "a.json"
    words = ["--html", str(page), "--svg", str(picture), "--perfetto", str(trace)]
    code, out, err = gapless("show 1f1b -K 2 -M 2 --format text", *words)
    assert code == 0
    assert Schedule.parse(out) == make_schedule("1f1b", devices=2, microbatches=2)
    assert err.splitlines() == [f"wrote {page}", f"wrote {picture}", f"wrote {trace}"]
    assert page.stat().st_size > 0
    assert picture.read_text().startswith("<svg")
    assert json.loads(trace.read_text())


def test_a_picture_that_is_refused_leaves_no_other_file_unwritten(gapless: Command, tmp_path: Path) -> None:
    picture, trace = tmp_path / "a.svg", tmp_path / "a.json"
    code, out, err = gapless(f"show gpipe -K 2 -M 12501 --svg {picture} --perfetto {trace}")
    assert (code, out) == (2, "")
    refusal = "50,004 actions are too many for an SVG, which takes at most 50,000: use --html, which draws millions"
    assert err == f"wrote {trace}\ngapless: {refusal}\n"
    assert trace.exists()
    assert not picture.exists()


def test_several_are_drawn_together(gapless: Command, tmp_path: Path) -> None:
    out = gapless(f"show gpipe 1f1b zb-v --svg {tmp_path / 'all.svg'}").out
    assert [line for line in out.splitlines() if line in ("gpipe", "1f1b", "zb-v")] == ["gpipe", "1f1b", "zb-v"]
    drawn = (tmp_path / "all.svg").read_text()
    assert all(f">{name}" in drawn for name in ("gpipe", "1f1b", "zb-v"))
    assert gapless("show gpipe 1f1b --format csv").err == "gapless: --format csv prints one schedule: name one\n"


def test_steps_follow_each_other_where_the_optimizer_does_not_wait(gapless: Command) -> None:
    code, out, err = gapless("show 1f1b -K 2 -M 2 --steps 2 --format text")
    assert (code, err) == (0, "")
    assert out == ("0: 0F0 0F1 0B0 0B1 0U0 0F2 0F3 0V1 0B2 0B3 0U1\n1: 1F0 1B0 1F1 1B1 1U0 1F2 1V1 1B2 1F3 1B3 1U1\n")
    assert "18 per minibatch in steady state" in gapless("show zb-h2 -K 3 -M 6 --steps 2").out


def test_steps_that_make_no_sense_are_refused(refused: Refusal) -> None:
    assert "--steps is 0, but it must be at least 1" in refused("show 1f1b --steps 0")
    assert "that would be about 64,000,000 actions" in refused("show 1f1b --steps 1000000")
    told = "--steps is for schedules with backwards, and without updates or transfers"
    assert told in refused("show pipedream --steps 2")
