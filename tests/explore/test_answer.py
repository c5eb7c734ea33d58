"""What the page shows can be had without it: the command and the line of Python really give it."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from gapless.cli import main
from gapless.explore.question import NAMES, Question, answer, timeline_of
from gapless.schedule.timeline import Timeline
from tests.view.test_page import data_of, packed_of

ALL = [Question(name, 4, 8) for name in NAMES]
CHANGED = [
    Question("zb-h1", 3, 7, None, 1.5, 0.75, 0.25, 0, 0.05, 6),
    Question("interleaved", 4, 8, 3, 1, 1, 1, 0.5, 0.1),
    Question("auto", 4, 8, 2, 1, 1.25, 0.7, 0, 0.1, 5),
    Question("1f1b", 4, 8, 2, 1, 1, 1, 1, 0, 3),
    Question("2bw", 4, 8, None, 1, 1, 1, 0, 0.2),
]


@pytest.mark.parametrize("question", ALL + CHANGED, ids=lambda question: question.schedule)
def test_the_command_and_the_python_line_give_what_is_seen(
    question: Question, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = answer(question)
    file = tmp_path / "page.html"
    assert main([*shlex.split(seen["command"])[1:], "--html", str(file)]) == 0
    html = file.read_text("utf-8")
    (drawn,) = data_of(html)["timelines"]
    assert {key: drawn[key] for key in drawn} == _as_read(seen, drawn)
    assert packed_of(html) == seen["packed"]
    names: dict[str, Any] = {}
    exec(seen["python"], names)
    timeline = names["timeline"]
    assert isinstance(timeline, Timeline)
    assert (timeline.starts, timeline.ends) == (timeline_of(question).starts, timeline_of(question).ends)
    assert timeline.peak == timeline_of(question).peak


def _as_read(seen: dict[str, Any], drawn: dict[str, Any]) -> dict[str, Any]:
    """As JSON leaves it: lists, no tuples."""

    def listed(value: Any) -> Any:
        return [listed(each) for each in value] if isinstance(value, list | tuple) else value

    return {key: listed(seen[key]) for key in drawn}


def test_the_words_of_both() -> None:
    found = answer(Question("interleaved", 4, 8, 3, recompute=0.5, latency=0.1, memory_limit=9))
    assert found["command"] == (
        "gapless show interleaved --devices 4 --microbatches 8 --stages-per-device 3 --memory-limit 9 --recompute 0.5 "
        "--latency 0.1 --remat"
    )
    assert found["python"] == (
        "import gapless; costs = gapless.Costs(recompute=0.5, latency=0.1); "
        "from gapless.schedule.lower import add_recompute; timeline = gapless.simulate(add_recompute("
        'gapless.make_schedule("interleaved", devices=4, microbatches=8, stages_per_device=3, memory_limit=9, '
        "costs=costs), costs, memory_limit=9), costs)"
    )
