"""The report of a run: figures, curves and tables in front of its timelines, on a page that trusts nobody."""

import re

import pytest

from gapless.view import run_page
from gapless.view.run_page import Curve, RunReport, thinned
from tests.view.conftest import EVIL, Opener, timeline_of

REPORT = RunReport(
    title=f"gpt {EVIL}",
    tiles=[("steps", "30"), ("last loss", EVIL)],
    curves=[
        Curve("Loss", EVIL, [("training", [(n, 5 - n / 10) for n in range(30)]), (EVIL, [(10, 4.0), (20, 3.5)])]),
        Curve("Learning rate", "flat", [("rate", [(n, 0.003) for n in range(30)])]),
        Curve("Nothing", "yet", [("none", [(1, float("nan"))])]),
    ],
    spent=[("forward and backward", 3.0), (EVIL, 1.0)],
    tables=[("Environment", [("torch", EVIL)])],
    listings=[("Config", f"[model]\nname = {EVIL!r}")],
    timelines=[timeline_of("zb-h1", label="measured"), timeline_of("zb-h1", label="predicted")],
)


@pytest.mark.browser
def test_all_of_it_is_shown_and_nothing_in_it_runs(show: Opener) -> None:
    shown = show(run_page.render(REPORT))
    assert shown.text("h1") == f"gpt {EVIL}"
    assert shown.page.locator(".tiles div").count() == 2
    assert shown.text(".tiles div:nth-child(2) dd") == EVIL
    assert shown.page.locator(".report figure").count() == 3
    assert re.sub(r"\s+", " ", shown.text("#spent")).startswith("Where the time went forward and backward 3.00 s 75.0%")
    assert shown.page.locator(".report img").count() == 0
    line = shown.page.locator("figure .line-0").first.bounding_box()
    assert line is not None
    assert line["width"] > 200
    assert line["height"] > 50
    shown.scroll_to(0)
    assert shown.ask("gapless.actionAt(0, 0, 0.5)")["action"] == "0F0"
    assert [shown.text(f"#name-{number}") for number in range(2)] == ["measured", "predicted"]


def test_long_curves_are_thinned_to_what_can_be_seen() -> None:
    points = thinned([(n, float(n % 2)) for n in range(10_000)])
    assert 250 <= len(points) <= 300
    assert {round(y, 1) for _, y in points} == {0.5}
    assert thinned([]) == []
