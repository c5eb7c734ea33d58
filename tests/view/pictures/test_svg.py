"""The standing picture: well-formed, complete, escaped, and honest about its limits."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from gapless.errors import ScheduleError
from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.lower import consecutive
from gapless.schedule.placement import line
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline
from gapless.view.pictures import svg
from gapless.view.pictures.look import Look
from gapless.view.pictures.picture_file import draw
from gapless.view.text import percent
from tests.pictures import FOLDER, pictures
from tests.view.conftest import EVIL, timeline_of

SVG = "{http://www.w3.org/2000/svg}"


def blocks(root: ElementTree.Element) -> list[ElementTree.Element]:
    return [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]


def test_every_action_is_one_block_with_its_words(eight: list[Timeline]) -> None:
    root = ElementTree.fromstring(svg.render(eight))
    found = blocks(root)
    assert len(found) == sum(timeline.schedule.num_actions for timeline in eight)
    assert found[0].findtext(f"{SVG}title") == "0F0: stage 0, forward, microbatch 0, 0 to 1"


def test_blocks_are_as_long_as_their_actions_on_one_axis_for_all() -> None:
    short, long = timeline_of("zb-h1", costs=Costs()), timeline_of("gpipe", costs=Costs())
    found = blocks(ElementTree.fromstring(svg.render([short, long], width=1108)))
    per_unit = (1108 - 76 - 32) / float(long.makespan)
    for timeline, shown in ((short, found[:96]), (long, found[96:])):
        spans = [span for device in range(4) for span in timeline.spans(device)]
        for (_, start, end), block in zip(spans, shown, strict=True):
            assert float(block.get("x", "")) == pytest.approx(92 + float(start) * per_unit, abs=0.01)
            assert float(block.get("width", "")) == pytest.approx(float(end - start) * per_unit - 1, abs=0.01)


def test_an_evil_name_stays_text(tmp_path: Path) -> None:
    draw(tmp_path / "picture.svg", timeline_of("gpipe", label=EVIL + "\x00\x1b\ud800"))
    root = ElementTree.parse(tmp_path / "picture.svg").getroot()
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {
        *("svg", "title", "style", "defs", "pattern", "rect", "text", "tspan", "path")
    }
    assert any((text.text or "").startswith("</script><img src=x") for text in root.iter(f"{SVG}text"))


@pytest.mark.parametrize("look", [{}, {"theme": "dark"}, {"greyscale": True}])
def test_every_class_has_a_fill(eight: list[Timeline], look: dict[str, Any]) -> None:
    picture = svg.render(eight, look=Look(**look))
    assert "@media" not in picture
    for name in set(re.findall(r'class="(k\d+-\d-\d)"', picture)):
        assert picture.count(f".{name}{{fill:#") == 1
    for name in set(re.findall(r"url\(#(\w+)\)", picture)):
        assert f'<pattern id="{name}"' in picture


def test_in_greys_a_device_has_one_hatch_for_each_kind() -> None:
    """With one for each action, Chromium took a minute for a PDF of 8 devices and 32 microbatches."""
    picture = svg.render([timeline_of("zb-h1", devices=8, microbatches=32)], look=Look(greyscale=True))
    row = re.escape('<path class="h') + r"\d"
    assert len(re.findall(row, picture)) == 8 * 2 + 2  # of I and W, and in the legend
    assert re.search(rf"device 0.*{row}.*label halo.*device 1", picture, re.DOTALL)  # numbers are above it
    assert not re.search(rf"device 0.*label halo.*{row}.*device 1<", picture, re.DOTALL)


def test_in_greys_updates_and_verdicts_look_like_nothing_else() -> None:
    """Both had the grey and the hatch of transfers."""
    drawn = consecutive(timeline_of("1f1b", microbatches=4).schedule, 2)
    fills = re.findall(r"}\.k\d+-0-2{(fill:#\w+)", svg.render([simulate(drawn)], look=Look(greyscale=True)))
    assert len(set(fills)) == len(fills) == len(drawn.kinds)


def test_numbers_are_left_out_where_blocks_are_too_narrow() -> None:
    timeline = timeline_of("gpipe", microbatches=32)
    assert svg.render([timeline], width=2400).count('class="label"') > 200
    assert svg.render([timeline], width=400).count('class="label"') == 2  # the legend's


def test_too_many_actions_are_refused_with_advice() -> None:
    rows = [[Action(0, Kind.FORWARD, m) for m in range(50_001)]]
    timeline = simulate(Schedule.of(rows, line(1)))
    expected = "50,001 actions are too many for an SVG, which takes at most 50,000: use --html, which draws millions"
    with pytest.raises(ScheduleError, match=re.escape(expected)):
        svg.render([timeline])
    with pytest.raises(ScheduleError, match="there is no timeline to draw"):
        svg.render([])


def test_a_schedule_that_takes_no_time_can_be_drawn() -> None:
    nothing = Costs(forward=0, input_grad=0, weight_grad=0)
    ElementTree.fromstring(svg.render([timeline_of("1f1b", costs=nothing)]))


def test_the_pictures_of_the_docs_are_those_of_today() -> None:
    drawn = dict(pictures())
    for name, picture in drawn.items():
        assert (FOLDER / name).read_text("utf-8") == picture, "draw them again: python -m tests.pictures"
    measured = {"largest.svg", "three-steps.svg"}  # by a benchmark, and by `python -m tests.measured_picture`
    assert {path.name for path in FOLDER.iterdir()} == set(drawn) | measured
    before, after = (timeline_of(name, 8, 32, costs=Costs()) for name in ("1f1b", "zb-v"))
    idle = f"idle time {percent(before.bubble, 0)} → {percent(after.bubble)}"  # as the title of the README's says
    assert idle in drawn["1f1b-and-zb-v.svg"]
    assert max(before.peak) == max(after.peak)
