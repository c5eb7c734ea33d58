"""Every page that we make, on a wide and a narrow screen, light and dark: quiet, and nothing wider than the window."""

import json
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from benchmarks.runner import summary_page
from benchmarks.runner.findings import Table, of_rounds
from benchmarks.runner.outcome import Outcome, slower
from gapless.cli import main
from gapless.explore.server import ExploreServer
from gapless.view import curves, page, run_page
from gapless.view.curves import Panel
from gapless.view.figures import Units
from tests.cli.test_plan import PROFILE
from tests.open_pages import Shown, quiet, watched
from tests.view.conftest import timeline_of
from tests.view.test_run_page import REPORT

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

LONG = "a name much longer than a narrow screen is wide, with-one-word-that-can-not-be-broken-anywhere-at-all " * 2
FITS = """() => {
    const scrolls = (node) => node && (getComputedStyle(node).overflowX !== "visible" || scrolls(node.parentElement));
    const tooWide = (node) => node.getBoundingClientRect().right > innerWidth + 0.5 && !scrolls(node.parentElement);
    const wide = [...document.querySelectorAll("body *:not(svg *)")].filter(tooWide);
    return [document.documentElement.scrollWidth <= innerWidth, wide.map((node) => node.outerHTML.slice(0, 120))];
}"""


def _commands(folder: Path) -> dict[str, str]:
    """What commands write."""
    profile = folder / "profile.json"
    profile.write_text(json.dumps(PROFILE | {"profile": LONG}))
    words = {
        "show": "show zb-v --devices 8 --microbatches 16 --memory-limit 7",
        "compare": "compare --devices 4 --microbatches 8 --memory-limit 6",
        "plan": f"plan {profile} --devices 3 --memory 100MiB --schedules 1f1b,zb-h1 --what-if devices+1",
    }
    for name, line in words.items():
        assert main([*line.split(), "--html", str(folder / f"{name}.html")]) == 0
    return {name: (folder / f"{name}.html").read_text("utf-8") for name in words}


def _rendered() -> dict[str, str]:
    """What runs, benchmarks and studies write."""
    pair = [timeline_of("zb-h1", label=label) for label in ("predicted", "measured")]
    figures = [of_rounds(LONG, [1.0, 2.0]), of_rounds("gain", [1.1, 1.3], "x", "more")]
    grid = Table("GPipe's table", ("model", *(f"K = {K}" for K in range(12))), [(LONG, *(["1234.5"] * 12))], LONG)
    found = Outcome("split", f"python -m benchmarks {LONG}", "2026-01-01", {"cpu": LONG}, figures, [grid], LONG)
    panels = [Panel(LONG, LONG, [[4.0, 2.0, 1.0]]), Panel("late", "delay 7", [[4.0, 3.0, 2.0]])]
    table = (("way", *(["loss"] * 12)), [(LONG, *(["1.0"] * 12))])
    return {
        "run": run_page.render(REPORT),
        "timeline": page.render(pair, units=Units("s", "activations"), ranked=False),
        "benchmarks": summary_page.render(
            {"split": found, "gpu": Outcome("gpu", "x", "", {}, [], skipped=LONG)},
            slower({"split": replace(found, figures=figures[:1])}, {"split": found}),
            quick=True,
        ),
        "study": curves.render(LONG, [LONG], [0.0, 5.0, 10.0], panels, ("minibatch", "loss"), table),
    }


def _look(shown: Shown, name: str) -> None:
    for width in (1280, 400):
        shown.page.set_viewport_size({"width": width, "height": 860})
        for scheme in ("light", "dark"):
            shown.page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
            shown.settle()
            assert shown.ask(FITS) == [True, []], (name, width)
            red = shown.ask("Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")
            assert (red > 128) == (scheme == "light"), (name, scheme)


def test_every_page_is_quiet_and_as_wide_as_the_window(
    browser: "Browser", tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = _commands(tmp_path) | _rendered()
    shown = watched(browser, 1280, 860)
    for name, html in pages.items():
        file = tmp_path / f"{name}.html"
        file.write_text(html, encoding="utf-8")
        shown.page.goto(file.as_uri())
        shown.ask("() => window.gapless?.ready")
        _look(shown, name)
        assert shown.ask("violations") == [], name
        assert shown.complaints == [], name
    with ExploreServer() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        shown.page.goto(server.address)
        shown.page.wait_for_function("() => explorer.idle() && explorer.names().length === 2")
        _look(shown, "explore")
        quiet(shown)
        server.shutdown()
        thread.join()
