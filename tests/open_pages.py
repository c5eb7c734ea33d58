"""A real browser, and pages that are open in it."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gapless.schedule.timeline import Timeline
from gapless.view import page as view_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# Before any script of the page: everything that the content security policy stopped.
WATCH = (
    "window.violations = []; addEventListener('securitypolicyviolation', e => violations.push(e.violatedDirective));"
)


@pytest.fixture(scope="session")
def browser() -> "Iterator[Browser]":
    if not os.path.exists(CHROMIUM):
        pytest.skip(f"there is no {CHROMIUM}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield found
        found.close()


@dataclass
class Shown:
    """A page that is open, and all that it said or asked for."""

    page: "Page"
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def complain(self, dialog: "Dialog") -> None:
        self.complaints.append(dialog.message)
        dialog.dismiss()

    def ask(self, expression: str, argument: object = None) -> Any:
        return self.page.evaluate(expression, argument)

    def settle(self) -> None:
        """Until two frames have been drawn."""
        self.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def scroll_to(self, timeline: int) -> None:
        self.ask("n => document.getElementById(`timeline-${n}`).scrollIntoView({behavior: 'instant'})", timeline)
        self.settle()

    def place(self, timeline: int, device: int, time: float) -> tuple[float, float]:
        found = self.ask("([t, d, x]) => gapless.place(t, d, x)", [timeline, device, time])
        return found["x"], found["y"]

    def hover(self, timeline: int, device: int, time: float) -> None:
        self.page.mouse.move(*self.place(timeline, device, time))
        self.settle()

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)
        self.settle()

    def view(self) -> tuple[float, float]:
        found = self.ask("gapless.view()")
        return found["start"], found["end"]

    def text(self, selector: str) -> str:
        found = self.page.inner_text(selector)
        assert isinstance(found, str)
        return found

    def pixels(self, timeline: int, layer: int, colour: str) -> int:
        """How many pixels of a canvas have, more or less, the colour of that name in the style sheet."""
        found = self.ask(
            """([timeline, layer, name]) => {
                const canvas = document.querySelectorAll(`#timeline-${timeline} canvas`)[layer];
                const probe = document.body.appendChild(document.createElement("i"));
                probe.style.color = `var(${name})`;
                const wanted = getComputedStyle(probe).color.match(/[\\d.]+/g).map(Number);
                probe.remove();
                const paper = new OffscreenCanvas(canvas.width, canvas.height);
                const copy = paper.getContext("2d", {willReadFrequently: true});
                copy.drawImage(canvas, 0, 0);
                const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
                let count = 0;
                for (let i = 0; i < data.length; i += 4)
                    if (data[i + 3] > 128 && [0, 1, 2].every(c => Math.abs(data[i + c] - wanted[c]) < 12)) count++;
                return count;
            }""",
            [timeline, layer, colour],
        )
        assert isinstance(found, int)
        return found


def watched(browser: "Browser", width: int, height: int) -> Shown:
    """An empty page of that size, all of whose complaints and requests are kept."""
    context = browser.new_context(viewport={"width": width, "height": height}, reduced_motion="reduce")
    context.add_init_script(WATCH)
    shown = Shown(context.new_page())
    shown.page.on("console", lambda message: shown.complaints.append(message.text))
    shown.page.on("pageerror", lambda error: shown.complaints.append(str(error)))
    shown.page.on("dialog", shown.complain)
    shown.page.on("request", lambda request: shown.requests.append(request.url))
    return shown


def quiet(shown: Shown) -> None:
    """Closes a page, which must have said nothing and broken none of its own rules."""
    check_quiet(shown)
    shown.page.context.close()


def check_quiet(shown: Shown) -> None:
    assert shown.complaints == []
    assert shown.ask("violations") == []


class Tabs:
    """Pages to open files in, used again one test after another: a new one takes a processor a second, since the
    browser starts processes for it. What a test may have left is put back: what was stored, theme, size and pointer.
    """

    def __init__(self, browser: "Browser") -> None:
        self._browser, self._free = browser, list[Shown]()

    def take(self, width: int, height: int) -> Shown:
        if not self._free:
            return watched(self._browser, width, height)
        shown = self._free.pop()
        shown.complaints.clear()
        shown.requests.clear()
        shown.page.set_viewport_size({"width": width, "height": height})
        return shown

    def give_back(self, shown: Shown) -> None:
        shown.ask("{ localStorage.clear(); sessionStorage.clear(); }")
        shown.page.emulate_media(media="null", color_scheme="light", reduced_motion="reduce")
        shown.page.mouse.move(0, 0)
        self._free.append(shown)


@pytest.fixture(scope="session")
def tabs(browser: "Browser") -> Tabs:
    return Tabs(browser)


Opener = Callable[..., Shown]


@pytest.fixture
def show(tabs: Tabs, tmp_path: Path) -> Iterator[Opener]:
    """Writes a page, opens it, and in the end checks that it was quiet: no error, dialog, request or violation."""
    opened: list[tuple[Shown, str]] = []

    def opener(what: list[Timeline] | str, width: int = 1200, height: int = 800, **options: Any) -> Shown:
        path = tmp_path / f"page-{len(opened)}.html"
        if isinstance(what, str):  # a page as it is
            path.write_text(what, encoding="utf-8")
        else:
            view_page.write(path, what, **options)
        return open_file(path, width, height)

    def open_file(path: Path, width: int, height: int) -> Shown:
        shown = tabs.take(width, height)
        opened.append((shown, path.as_uri()))
        shown.page.goto(path.as_uri())
        shown.ask("gapless.ready")
        shown.settle()
        return shown

    yield opener
    for shown, url in opened:
        assert shown.requests == [url]
        check_quiet(shown)
        tabs.give_back(shown)
