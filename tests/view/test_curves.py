"""Curves on a page: what is drawn, and that nothing is loaded or run."""

import re

import pytest

from gapless.errors import ScheduleError
from gapless.view.curves import Panel, mean, render

TABLE = (("way", "loss"), [("plain", "1.0"), ("<late>", "1.5")])


def page(*panels: Panel) -> str:
    return render("A & B", ["What was done."], [0.0, 5.0, 10.0], panels, ("minibatch", "loss"), TABLE)


def test_every_run_and_their_mean_are_drawn_over_the_first_way() -> None:
    drawn = page(
        Panel("plain", "delay 0", [[4.0, 2.0, 1.0], [4.0, 3.0, 1.0]]),
        Panel("late", "delay 7", [[4.0, 3.0, 2.0], [4.0, None, None]]),
    )
    assert drawn.count('class="other"') == 2
    assert drawn.count('class="seed"') == 4
    (path,) = re.findall(r'class="mean" d="([^"]*)"', drawn)
    assert path == "M40.0 8.0L176.0 60.7L312.0 113.3"
    assert 'class="seed" d="M40.0 8.0"' in drawn  # the run that has ended after its first point
    assert "<h2>late</h2><span>delay 7</span>" in drawn


def test_names_are_escaped_and_nothing_is_loaded_or_run() -> None:
    drawn = page(Panel('<script>alert("x")</script>', "&", [[1.0, None, 0.5]]))
    assert "<script" not in drawn
    assert "&lt;script&gt;" in drawn
    assert "&lt;late&gt;" in drawn
    assert "<title>A &amp; B</title>" in drawn
    assert not re.search(r"(src|href|url\(|@import)", drawn.split("</style>")[1])
    assert "default-src 'none'; style-src 'sha256-" in drawn
    assert "http" not in drawn.replace('http-equiv="', "")


def test_a_mean_is_of_the_runs_that_are_there() -> None:
    assert mean([[1.0, 2.0, None], [3.0, None, None]]) == [2.0, 2.0, None]


def test_without_curves_there_is_no_page() -> None:
    with pytest.raises(ScheduleError, match="give at least one panel"):
        page()


@pytest.mark.parametrize("values", [[1.0, 1.0, 1.0], [None, None, None], [1e9, 2e-9, 0.0]])
def test_any_values_can_be_drawn(values: list[float | None]) -> None:
    assert "nan" not in page(Panel("plain", "", [values]))
