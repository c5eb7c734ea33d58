"""What leaves the page: pictures that are saved, captured or printed, and links that others open."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gapless.schedule.timeline import Timeline
from tests.view.conftest import EVIL, Opener, Shown, timeline_of

pytestmark = pytest.mark.browser
SVG = "{http://www.w3.org/2000/svg}"
# Per timeline, whether anything is painted into its rows.
PAINTED = """[...document.querySelectorAll(".layers canvas:first-child")].map(canvas => {
    const paper = new OffscreenCanvas(64, 64);
    const pen = paper.getContext("2d");
    pen.drawImage(canvas, 0, 0, 64, 64);
    return pen.getImageData(0, 0, 64, 64).data.some(value => value > 0);
})"""


def saved(shown: Shown, button: str, folder: Path) -> Path:
    with shown.page.expect_download() as waiting:
        shown.page.click(button)
    path = folder / waiting.value.suggested_filename
    waiting.value.save_as(path)
    return path


def test_the_svg_has_every_action_in_view_and_the_title_as_text(show: Opener, tmp_path: Path) -> None:
    shown = show([timeline_of("zb-v"), timeline_of("gpipe", label=EVIL)])
    file = saved(shown, "#save-svg", tmp_path)
    assert file.name.startswith("2-schedules-4-devices")
    root = ElementTree.parse(file).getroot()
    assert root.findtext(f"{SVG}title") == shown.text("h1")
    fills = set(shown.ask("JSON.parse(document.getElementById('data').textContent).kinds.flatMap(k => k.light.flat())"))
    blocks = [rect for rect in root.iter(f"{SVG}rect") if rect.get("fill") in fills]
    assert len(blocks) == timeline_of("zb-v").schedule.num_actions + timeline_of("gpipe").schedule.num_actions
    assert EVIL.replace("\u2028", "") in "".join(root.itertext()).replace("\u2028", "")
    shown.press("+", "+", "+", "+")
    fewer = list(ElementTree.parse(saved(shown, "#save-svg", tmp_path)).iter(f"{SVG}rect"))
    assert 0 < len(fewer) < len(blocks) / 2


def test_the_png_holds_all_timelines_in_twice_the_pixels(show: Opener, eight: list[Timeline], tmp_path: Path) -> None:
    shown = show(eight)
    data = saved(shown, "#save-png", tmp_path).read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width == 2 * (shown.ask("document.getElementById('axis').clientWidth") + 32)
    assert height > 2 * 8 * 4 * 62  # the rows alone


def test_what_is_outside_the_window_is_painted_too(show: Opener, eight: list[Timeline]) -> None:
    shown = show(eight, height=400)
    shown.page.wait_for_function(f"() => {PAINTED}.every(Boolean)")


def test_on_paper_everything_is_painted_and_light(show: Opener, eight: list[Timeline]) -> None:
    shown = show(eight, height=400)
    shown.page.emulate_media(color_scheme="dark")
    shown.settle()
    shown.ask("dispatchEvent(new Event('beforeprint'))")
    assert all(shown.ask(PAINTED))
    assert shown.ask("getComputedStyle(document.body).backgroundColor") == "rgb(251, 251, 252)"
    shown.ask("dispatchEvent(new Event('afterprint'))")
    assert shown.ask("getComputedStyle(document.body).backgroundColor") == "rgb(14, 16, 20)"
    pages = len(re.findall(rb"/Type\s*/Page\b", shown.page.pdf(prefer_css_page_size=True)))
    assert pages >= 2


def test_rows_that_are_thin_on_paper_are_tall_again_after_it(show: Opener) -> None:
    shown = show([timeline_of("gpipe", devices=140, microbatches=1)])
    shown.page.select_option("#density", "comfortable")
    height = "document.querySelector('.plot').clientHeight"
    tall = shown.ask(height)
    shown.ask("dispatchEvent(new Event('beforeprint'))")
    assert shown.ask(height) < tall / 2
    shown.ask("dispatchEvent(new Event('afterprint'))")
    assert shown.ask(height) == tall > 8192


def test_a_link_keeps_the_zoom_the_rows_and_the_pinned_action(show: Opener, eight: list[Timeline]) -> None:
    shown = show(eight)
    shown.scroll_to(1)
    shown.press("+", "+")
    shown.page.select_option("#density", "compact")
    shown.page.focus("#timeline-1 .plot")
    shown.press("Shift+ArrowRight", "Shift+ArrowRight")
    shown.page.wait_for_function("() => location.hash.includes('0F1') && location.hash.includes('compact')")
    link, view = shown.ask("location.href"), shown.view()
    shown.press("Escape", "0")
    shown.page.select_option("#density", "comfortable")
    shown.page.wait_for_function("() => location.hash === ''")
    assert shown.view() != view
    shown.page.goto("about:blank")
    shown.page.goto(link)
    shown.ask("gapless.ready")
    shown.settle()
    assert shown.ask("gapless.pinned()") == "0F1"
    assert shown.view() == pytest.approx(view)
    assert shown.ask("document.getElementById('density').value") == "compact"
    shown.requests[1:] = []  # it was left and opened again


def test_a_link_that_makes_no_sense_shows_the_whole(show: Opener, eight: list[Timeline]) -> None:
    shown = show(eight[:2])
    for words in ("from=x&to=9", "from=9&to=1", "pinned=99:0F0&rows=none", "pinned=0:9Z9", "timeline-1"):
        shown.ask("words => { location.hash = words }", words)
        shown.settle()
        assert shown.view() == (0, max(float(timeline.makespan) for timeline in eight[:2]))
        assert shown.ask("gapless.pinned()") is None
