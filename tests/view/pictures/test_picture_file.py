"""Pictures in files: by their suffix, in the size and the look that was asked for."""

import re
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gapless
from gapless.errors import ConfigError
from gapless.view.pictures import picture_file
from tests.view.conftest import timeline_of


def test_an_svg_has_the_width_of_a_paper(tmp_path: Path) -> None:
    gapless.draw(tmp_path / "a.svg", timeline_of("1f1b"), timeline_of("zb-v"), width=85, font="Helvetica", labels=False)
    drawn = (tmp_path / "a.svg").read_text()
    assert 'width="85mm"' in drawn
    assert 'font:12px "Helvetica",' in drawn
    assert not re.search(r'class="label"[^>]*>\d', drawn)
    assert ">1f1b" in drawn
    gapless.draw(tmp_path / "b.svg", timeline_of("1f1b"), headings=False)
    assert ">1f1b" not in (tmp_path / "b.svg").read_text()


def test_a_pdf_and_a_png_are_drawn_by_what_is_there(tmp_path: Path) -> None:
    timelines = timeline_of("1f1b"), timeline_of("zb-v")
    gapless.draw(tmp_path / "a.pdf", *timelines, width=170, greyscale=True)
    pdf = (tmp_path / "a.pdf").read_bytes()
    assert pdf.startswith(b"%PDF")
    box = re.search(rb"/MediaBox\s*\[\s*0 0 ([\d.]+) ([\d.]+)", pdf)
    assert box is not None
    assert float(box[1]) == pytest.approx(170 / 25.4 * 72, abs=1.5)  # points
    gapless.draw(tmp_path / "a.png", *timelines, theme="dark")
    png = (tmp_path / "a.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert struct.unpack(">I", png[16:20]) == (2400,)


def test_without_a_tool_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_file, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"'a\.pdf': a PDF needs cairosvg or Chromium, .*: pip install cairosvg"):
        gapless.draw(tmp_path / "a.pdf", timeline_of("1f1b"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "look", "fault"),
    [
        ("a.gif", {}, r"'a\.gif' has no suffix of a picture: name it \.svg, \.pdf or \.png"),
        ("a", {}, "'a' has no suffix of a picture"),
        ("a.svg", {"width": 3}, "width is 3 mm, but a picture is from 40 to 2000 mm wide"),
        ("a.svg", {"theme": "blue"}, "theme is 'blue', but it must be 'light' or 'dark'"),
        ("a.svg", {"font": "a;}</style>"}, "font is .*, but it must be the name of a font family"),
    ],
)
def test_what_makes_no_picture_is_an_error(tmp_path: Path, name: str, look: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        gapless.draw(tmp_path / name, timeline_of("1f1b"), **look)
    assert not list(tmp_path.iterdir())


def test_a_page_is_a_file_too_and_what_was_measured_has_units(tmp_path: Path) -> None:
    simulated = timeline_of("1f1b")
    gapless.draw(tmp_path / "a.html", simulated)
    assert '"unit":"ms"' not in (tmp_path / "a.html").read_text()
    gapless.draw(tmp_path / "a.html", replace(simulated, unit="s"), simulated, title="a step")
    drawn = (tmp_path / "a.html").read_text()
    assert "<title>a step</title>" in drawn
    assert '"unit":"s"' in drawn
    assert "peak memory, activations" in drawn
    with pytest.raises(ConfigError, match="a page has no such option"):
        gapless.draw(tmp_path / "a.html", simulated, width=80)


def test_what_is_no_timeline_is_told_how_to_make_one(tmp_path: Path) -> None:
    timeline, file = timeline_of("1f1b"), tmp_path / "a.svg"
    with pytest.raises(ConfigError, match="draw takes the file first"):
        gapless.draw(timeline, "schedule.svg")  # type: ignore[arg-type]
    for other in (timeline.schedule, None):
        with pytest.raises(ConfigError, match=rf"this is a {type(other).__name__}: simulate\(schedule\) makes one"):
            gapless.draw(file, other)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match="a picture has no option 'grayscale': it takes title, width, font, theme, gr"
    ):
        gapless.draw(file, timeline, grayscale=True)
    assert not list(tmp_path.iterdir())
