"""The explorer in a real browser: what is asked is drawn, at once, and what is seen can be had elsewhere."""

from typing import TYPE_CHECKING

import pytest

from gapless.explore.question import Question, answer
from gapless.explore.server import ExploreServer
from tests.open_pages import Shown, quiet, watched

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def shown(browser: "Browser", explorer: ExploreServer) -> "Iterator[Shown]":
    found = watched(browser, 1280, 860)
    found.page.goto(explorer.address)
    rest(found)
    yield found
    quiet(found)


def rest(shown: Shown) -> None:
    """Until all that was asked has been drawn."""
    shown.page.wait_for_function("() => explorer.idle()")
    shown.settle()


def slide(shown: Shown, **values: float) -> None:
    for name, value in values.items():
        shown.ask(
            """([name, value]) => {
                const range = document.querySelector(`input[type="range"][name="${name}"]`);
                range.value = value;
                range.dispatchEvent(new Event("input", {bubbles: true}));
            }""",
            [name, value],
        )
    rest(shown)


def choose(shown: Shown, *names: str) -> None:
    shown.ask(
        """names => {
            for (const box of document.querySelectorAll('input[name="schedule"]'))
                if (box.checked !== names.includes(box.value)) box.click();
        }""",
        list(names),
    )
    rest(shown)


def again(shown: Shown) -> None:
    shown.page.click('button[type="reset"]')
    shown.page.wait_for_function("() => document.querySelector('h1').textContent.includes('8 devices')")
    rest(shown)


def test_it_opens_with_two_schedules_and_a_title(shown: Shown) -> None:
    again(shown)
    assert shown.ask("explorer.names()") == ["1f1b", "zb-v"]
    assert shown.text("h1") == "1f1b, zb-v · 8 devices · 32 microbatches"
    assert [shown.text(f"#timeline-{number} .figures b >> nth=1") for number in (0, 1)] == [
        "17.95% of makespan",
        "3.52% of makespan",
    ]


def test_sliders_and_boxes_redraw_what_the_simulator_says(shown: Shown) -> None:
    again(shown)
    slide(shown, devices=4, microbatches=8, latency=0.25, memory_limit=6)
    choose(shown, "zb-h1", "interleaved", "v-half")
    assert shown.ask("explorer.names()") == ["interleaved", "zb-h1", "v-half"]
    for number, name in enumerate(shown.ask("explorer.names()")):
        seen = answer(Question(name, 4, 8, latency=0.25, memory_limit=6))
        assert shown.ask("explorer.ways()")[number] == [seen["command"], seen["python"]]
        assert shown.text(f"#timeline-{number} .figures b >> nth=0") == seen["figures"][0][1]
    assert shown.ask("gapless.actionAt(1, 0, 0.5)")["action"] == "0F0"


def test_what_can_not_be_made_is_said_in_the_page(shown: Shown) -> None:
    again(shown)
    slide(shown, devices=8)
    shown.page.fill('[data-of="devices"]', "60")
    shown.page.fill('[data-of="microbatches"]', "512")
    rest(shown)
    told = shown.ask("explorer.refused()")
    assert len(told) == 2
    assert told[0].startswith("1f1b would have up to 92,160 actions, and this page draws 40,000: use fewer")
    shown.page.fill('[data-of="devices"]', "")
    rest(shown)
    assert len(shown.ask("explorer.refused()")) == 2
    again(shown)
    assert shown.ask("explorer.refused()") == []


def test_a_link_keeps_sliders_boxes_zoom_and_the_pinned_action(shown: Shown) -> None:
    again(shown)
    slide(shown, devices=4, microbatches=6)
    choose(shown, "gpipe", "zb-h2")
    shown.press("+", "+")
    shown.page.focus("#timeline-1 .plot")
    shown.press("Shift+ArrowRight", "Shift+ArrowRight")
    shown.page.wait_for_function("() => location.hash.includes('0F1') && location.hash.includes('zb-h2')")
    link, view = shown.ask("location.href"), shown.view()
    again(shown)
    shown.page.goto("about:blank")
    shown.page.goto(link)
    rest(shown)
    assert shown.ask("explorer.names()") == ["gpipe", "zb-h2"]
    assert shown.text("h1") == "gpipe, zb-h2 · 4 devices · 6 microbatches"
    assert shown.ask("gapless.pinned()") == "0F1"
    assert shown.view() == pytest.approx(view)
    shown.press("Escape")


@pytest.mark.slow
def test_the_time_from_a_slider_to_the_picture(shown: Shown) -> None:
    """16 devices and 64 microbatches: what it takes is told, and not judged here, where all cores are busy."""
    again(shown)
    slide(shown, devices=16, microbatches=64)
    told = []
    for names in (["1f1b", "zb-v"], ["interleaved"], ["v-half"], ["2bw"]):
        choose(shown, *names)
        slide(shown, latency=0.03)
        slide(shown, latency=0.0)
        taken = []
        for step in (0.11, 0.13, 0.17):
            slide(shown, latency=step)
            taken.append(shown.ask("explorer.redrawn()"))
        told.append(f"{', '.join(names)}: {sorted(taken)[1]:.0f} ms")
        assert shown.ask("explorer.names()") == names
    print("\nredrawn at 16 devices and 64 microbatches:", "; ".join(told))
