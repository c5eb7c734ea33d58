"""The page as text: nothing escapes, nothing is rounded, the same input gives the same bytes."""

import json
import re
import zlib
from array import array
from base64 import b64decode, b64encode
from fractions import Fraction
from hashlib import sha256
from html import unescape
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from gapless.errors import ScheduleError
from gapless.schedule.action import Kind, Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.dependencies import completes, dependencies
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline
from gapless.view import legend, page, summary, template
from gapless.view.columns import resolve
from gapless.view.figures import Units, figure
from tests.view.conftest import EVIL, later, timeline_of


def data_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    assert isinstance(data, dict)
    return data


def packed_of(html: str, number: int = 0) -> str:
    found = re.search(rf'<script type="text/plain" id="columns-{number}">(.*?)</script>', html)
    assert found is not None
    return found[1]


def columns_of(html: str, number: int = 0) -> dict[str, list[float]]:
    """What the script reads, read here: the differences summed up again."""
    raw = zlib.decompress(b64decode(packed_of(html, number)))
    columns, offset = {}, 0
    for column in data_of(html)["timelines"][number]["columns"]:
        size = column["length"] * (8 if column["type"] == "float64" else 4)
        values = array("d" if column["type"] == "float64" else "i", raw[offset : offset + size])
        offset += size + -size % 8
        exact = list(values) if column["type"] == "float64" else [v / column["scale"] for v in accumulate(values)]
        columns[column["name"]] = exact
    return columns


def test_the_same_timelines_give_the_same_page(eight: list[Timeline]) -> None:
    assert page.render(eight) == page.render([timeline_of(timeline.name) for timeline in eight])


def test_writing_gives_the_rendered_page(eight: list[Timeline], tmp_path: Path) -> None:
    page.write(tmp_path / "page.html", eight, title="x", memory_limit=3)
    assert (tmp_path / "page.html").read_text("utf-8") == page.render(eight, title="x", memory_limit=3)


def test_no_timeline_is_refused_with_a_sentence() -> None:
    with pytest.raises(ScheduleError, match="there is no timeline to draw: give at least one"):
        page.render([])


def test_the_policy_allows_the_one_script_and_the_one_style_by_hash_and_nothing_else(eight: list[Timeline]) -> None:
    html = page.render(eight)
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert found is not None
    policy = dict(part.split(" ", 1) for part in unescape(found[1]).split("; "))
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)

    def hashed(source: str) -> str:
        return f"'sha256-{b64encode(sha256(source.encode()).digest()).decode()}'"

    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == hashed(script)
    assert policy["style-src"] == hashed(style)
    assert "unsafe" not in found[1]
    assert html.index("Content-Security-Policy") < html.index("<style>") < html.index("<script>")


def test_the_page_refers_to_nothing_outside_itself(eight: list[Timeline]) -> None:
    html = page.render(eight)
    assert not re.search(r"\b(src|srcset|action|data|poster)=", html)
    assert set(re.findall(r'href="([^"]*)"', html)) == {f"#timeline-{number}" for number in range(8)}
    assert not re.search(r"https?:|url\(|@import|\bfetch\(|XMLHttpRequest|innerHTML|\beval\(", html)
    assert not re.search(r"\son\w+=|\sstyle=", html)


def test_an_evil_name_stays_text_in_every_place(eight: list[Timeline]) -> None:
    evil = page.render([timeline_of("gpipe", label=EVIL)], title=EVIL)
    tame = page.render([timeline_of("gpipe", label="x")], title="x")
    tags = re.compile(r"<[a-z/!][^>]*>", re.IGNORECASE)
    assert [tag.split()[0] for tag in tags.findall(evil)] == [tag.split()[0] for tag in tags.findall(tame)]
    assert data_of(evil)["timelines"][0]["name"] == EVIL
    assert f"<title>{template.text(EVIL)}</title>" in evil


def test_a_name_with_a_lone_surrogate_can_be_written(tmp_path: Path) -> None:
    page.write(tmp_path / "page.html", [timeline_of("gpipe", label="a\ud800b")], title="\udfff")
    assert "a?b" in (tmp_path / "page.html").read_text("utf-8")


@pytest.mark.parametrize(
    "costs",
    [
        Costs(),
        Costs(forward=0.1, input_grad=0.2, weight_grad=0.3, latency=0.01, activation=0.7),
        Costs(forward=Fraction(1, 2), input_grad=Fraction(3, 4), activation=Fraction(1, 3)),
        Costs(forward=3_000_000_000, latency=1),
    ],
    ids=["whole", "floats", "fractions", "large"],
)
@pytest.mark.parametrize("name", ["zb-v", "2bw"])
def test_every_number_arrives_exactly(name: str, costs: Costs) -> None:
    timeline = timeline_of(name, costs=costs)
    columns = columns_of(page.render([timeline]))
    assert columns["start"] == [float(start) for row in timeline.starts for start in row]
    assert columns["end"] == [float(end) for row in timeline.ends for end in row]
    assert columns["held"] == [float(held) for row in timeline.memory for held, _ in row]
    assert columns["after"] == [float(after) for row in timeline.memory for _, after in row]
    made = list(timeline.schedule.actions)
    assert columns["stage"] == [action.stage for action in made]
    assert columns["microbatch"] == [action.microbatch for action in made]
    assert [legend.KINDS[int(kind)] for kind in columns["kind"]] == [action.kind for action in made]


def test_whole_numbers_and_halves_become_integers_and_others_floats() -> None:
    def types(costs: Costs) -> str:
        described = data_of(page.render([timeline_of("zb-v", costs=costs)]))["timelines"][0]["columns"]
        return f"{described[0]['type']} {described[0].get('scale')}"

    assert types(Costs()) == "int32 2"
    assert types(Costs(forward=0.1)) == "float64 None"


def test_a_measured_timeline_is_drawn_from_its_own_start() -> None:
    simulated = timeline_of("1f1b", costs=Costs())
    assert columns_of(page.render([later(simulated, 1000)])) == columns_of(page.render([simulated]))


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "2bw"])
def test_links_are_what_the_one_rule_says(name: str) -> None:
    schedule = timeline_of(name).schedule
    links, made = resolve(schedule), list(schedule.actions)
    for number, action in enumerate(made):
        met = {gift for need in links.of(number) for gift in completes(made[need])}
        assert met.issuperset(dependencies(action, schedule))
        assert len(links.of(number)) == len(dependencies(action, schedule))


def test_a_need_that_nobody_meets_is_left_out() -> None:
    schedule = Schedule.parse("0: 0F0\n1: 1F1")
    assert list(resolve(schedule).needs) == []


def test_the_page_embeds_exactly_these_links() -> None:
    timeline = timeline_of("zb-v")
    columns, links = columns_of(page.render([timeline])), resolve(timeline.schedule)
    found = iter(columns["needBack"])
    for number, count in enumerate(columns["needCount"]):
        assert [number - next(found) for _ in range(int(count))] == list(links.of(number))


def test_every_fill_is_readable_under_the_ink_in_light_and_dark() -> None:
    def luminance(colour: str) -> float:
        parts = [part / 255 for part in bytes.fromhex(colour[1:])]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for kind in Kind:
        for tint in range(legend.NUM_TINTS):
            for step in range(legend.NUM_STEPS):
                for dark in (False, True):
                    fill = luminance(legend.shade(kind, tint, step, dark))
                    assert (fill + 0.05) / (luminance(legend.INK) + 0.05) >= 4.5


def test_stages_of_one_device_have_tints_of_their_own() -> None:
    assert legend.tints(timeline_of("1f1b").schedule) == [[0]] * 4
    assert legend.tints(timeline_of("zb-v").schedule) == [[0, 1]] * 4
    eight_stages = Schedule.parse("0: " + " ".join(f"{stage}F0" for stage in range(8)))
    assert legend.tints(eight_stages) == [[0, 0, 1, 1, 2, 2, 3, 3]]


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0"),
        (33, "33"),
        (1234567, "1,234,567"),
        (Fraction(57, 2), "28.5"),
        (1 / 3, "0.333333"),
        (0.1 + 0.2, "0.3"),
        (12345.678901, "12,345.68"),
        (2.5e-7, "2.5e-07"),
    ],
)
def test_figures_are_short_and_exact_where_they_can_be(number: float | Fraction, shown: str) -> None:
    assert figure(number) == shown


def test_the_best_of_each_column_is_marked_and_none_where_all_are_alike() -> None:
    html = summary.table([timeline_of("gpipe", costs=Costs()), timeline_of("1f1b", costs=Costs())])
    first, second = re.findall(r"<tr data-timeline.*?</tr>", html)
    assert "(best)" not in first
    assert re.findall(r"<span>([^<]*)</span><span class=\"unseen\"> \(best\)", second) == ["4"]


def test_measured_and_predicted_do_not_compete_and_have_units() -> None:
    # A medal for "predicted" said nothing, and 0.034128 was a makespan without a unit.
    quick, slow = (Costs(each, each, each, activation=3 * 2**20) for each in (0.002, 0.003))
    pair = [timeline_of("zb-h1", costs=quick, label="measured"), timeline_of("zb-h1", costs=slow, label="predicted")]
    html = page.render(pair, units=Units("s", "bytes"), ranked=False)
    assert "(best)" not in html
    assert "makespan, ms</button>" in html
    assert "peak memory, MiB</button>" in html
    assert data_of(html)["time"] == {"factor": 1000, "unit": "ms"}
    assert data_of(html)["timelines"][0]["figures"][2] == ["peak", "12 MiB"]


def test_what_has_several_minibatches_competes_with_nobody() -> None:
    # The period of pipedream is that of one microbatch: it looked like the best of all.
    html = summary.table([timeline_of("pipedream"), timeline_of("1f1b"), timeline_of("gpipe")])
    rows = re.findall(r"<tr data-timeline.*?</tr>", html)
    assert "(best)" not in rows[0]
    assert "(best)" in rows[1]


@pytest.mark.parametrize(
    ("names", "title"),
    [
        (["zb-v"], "zb-v · 8 devices · 3.5% bubble"),
        (["1f1b", "zb-v"], "2 schedules · 8 devices · 3.5% bubble at best (zb-v)"),
        (["naive", "2bw"], "2 schedules · 8 devices · 87.5% bubble at best (naive)"),
    ],
)
def test_the_title_says_what_it_is(names: list[str], title: str) -> None:
    assert page.title_of([timeline_of(name, 8, 32, Costs()) for name in names]) == title


def test_the_title_of_one_schedule_seen_twice_has_both_bubbles() -> None:
    pair = [timeline_of("1f1b", costs=Costs(), label=label) for label in ("measured", "predicted")]
    assert page.title_of(pair) == "1f1b · 4 devices · bubble 27.3% measured, 27.3% predicted"


def test_what_takes_many_times_as_long_does_not_squeeze_the_others() -> None:
    quick, slow = timeline_of("1f1b", 8), timeline_of("naive", 8)
    assert data_of(page.render([quick, slow]))["home"] == float(quick.makespan)
    assert data_of(page.render([quick, slow], ranked=False))["home"] is None


def test_a_schedule_of_several_minibatches_shows_its_period() -> None:
    assert "period" not in summary.table([timeline_of("1f1b")])
    assert "period" in summary.table([timeline_of("2bw")])


def test_odd_timelines_can_be_drawn() -> None:
    free = Costs(forward=0, input_grad=0, weight_grad=0)
    for text in ("0: 0F0", "0: 0F0\n1:"):
        for costs in (Costs(), free):
            assert "timeline-0" in page.render([simulate(Schedule.parse(text), costs)], memory_limit=float("inf"))
