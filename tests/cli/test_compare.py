"""`gapless compare`: everything ranked, the best marked, and why the others are not there."""

import json
import re
from html import escape
from pathlib import Path

from gapless.schedule.recipes import RECIPES
from tests.cli.conftest import Command, Refusal


def test_the_ranking_for_4_devices_and_8_microbatches(gapless: Command) -> None:
    code, out, err = gapless("compare")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "   schedule     makespan  bubble  span  span bubble  peak  stages  actions"
    assert lines[1] == "*  zb-v             25.5    5.9%    24         0.0%     4       8      192"
    names = [line[3:].split()[0] for line in lines[1:14]]
    assert names[-4:] == ["1f1b", "eager-1f1b", "gpipe", "naive"]
    assert "* shortest makespan" in lines
    assert "  pipedream            3   peak 4" in lines


def test_json_has_every_schedule_once(gapless: Command) -> None:
    found = json.loads(gapless("compare --json").out)
    assert found["best"] == "zb-v"
    assert found["objective"] == "makespan"
    assert {each["schedule"] for each in found["schedules"]} | {"optimal"} == set(RECIPES) | {"optimal"}
    ranks = [each["rank"] for each in found["schedules"]]
    assert ranks == [*range(1, len(ranks) - 1), None, None]
    assert [each["best"] for each in found["schedules"]].count(True) == 1
    makespans = [each["makespan"] for each in found["schedules"] if each["rank"]]
    assert makespans == sorted(makespans)


def test_the_objective_decides_the_order(gapless: Command) -> None:
    found = json.loads(gapless("compare --objective span --json").out)
    spans = [each["span"] for each in found["schedules"] if each["rank"]]
    assert spans == sorted(spans)


def test_a_memory_limit_leaves_out_what_does_not_fit_and_says_why(gapless: Command) -> None:
    found = json.loads(gapless("compare --memory-limit 3 --json").out)
    assert max(max(each["peak"]) for each in found["schedules"]) <= 3
    assert found["refused"]["gpipe"] == "its peak of 8 is above the limit of 3"
    assert "left out:\n  gpipe       its peak of 8 is above the limit of 3" in gapless("compare --memory-limit 3").out


def test_a_limit_may_be_a_multiple_of_1f1b_s(gapless: Command) -> None:
    assert json.loads(gapless("compare --memory-limit 1x --json").out)["refused"]["zb-h2"] == (
        "its peak of 7 is above the limit of 4"
    )


def test_ties_go_to_the_one_that_holds_less(gapless: Command) -> None:
    names = [each["schedule"] for each in json.loads(gapless("compare --stages-per-device 1 --json").out)["schedules"]]
    assert names.index("1f1b") < names.index("eager-1f1b") < names.index("gpipe")


def test_thirds_of_a_cost_do_not_change_the_order_of_equals(gapless: Command) -> None:
    # 3 stages per device make costs of a third, whose sums differ in their last bit.
    found = json.loads(gapless("compare --stages-per-device 3 --json").out)
    assert [each["schedule"] for each in found["schedules"]] == ["interleaved", "looped-bfs"]
    assert found["schedules"][0]["makespan"] == found["schedules"][1]["makespan"] == 27


def test_where_nothing_can_be_made_the_reason_is_given(refused: Refusal) -> None:
    told = "no schedule can be made (naive: forward lists 3 stages, but the schedule has 4; "
    assert refused("compare --forward 1,2,3").startswith(told)


def test_the_page_has_every_schedule_of_the_terminal_and_says_what_was_left_out(
    gapless: Command, tmp_path: Path
) -> None:
    # naive, pipedream and 2bw were in the terminal's table, and not on the page.
    file = tmp_path / "page.html"
    told = json.loads(gapless(f"compare --memory-limit 4 --json --html {file}").out)
    html = file.read_text("utf-8")
    names = re.findall(r'<a href="#timeline-\d+">([^<]*)</a>', html)
    assert names == [each["schedule"] for each in told["schedules"]]
    assert {"naive", "pipedream", "2bw"} <= set(names)
    assert '"rows":"overview"' in html
    for name, reason in told["refused"].items():
        assert f'<th scope="row">{name}</th><td>{escape(reason)}</td>' in html


def test_only_those_that_are_named(gapless: Command, refused: Refusal) -> None:
    found = json.loads(gapless("compare --schedules zb-h1,1f1b,pipedream --json").out)
    assert [each["schedule"] for each in found["schedules"]] == ["zb-h1", "1f1b", "pipedream"]
    assert gapless("compare --schedules ,").out == gapless("compare").out
    assert refused("compare --schedules 1f1b,zbv") == "there is no schedule named 'zbv'; did you mean zb-v?"


def test_schedules_in_files_are_ranked_beside_others(gapless: Command, tmp_path: Path) -> None:
    files: dict[str, Path] = {}
    for words in ("zb-h1", "pipedream", "zb-h1 --devices 3"):
        files[words] = tmp_path / f"{len(files)}.txt"
        files[words].write_text(gapless(f"show {words} --format text").out)
    found = json.loads(gapless(f"compare --json --schedules 1f1b,{','.join(map(str, files.values()))}").out)
    mine, stream, other = map(str, files.values())
    assert [each["schedule"] for each in found["schedules"]] == [mine, "1f1b", stream]
    assert [each["rank"] for each in found["schedules"]] == [1, 2, None]
    alike = json.loads(gapless("compare --json --schedules zb-h1").out)["schedules"][0]
    assert found["schedules"][0] == {**alike, "schedule": mine}
    assert found["refused"] == {other: "this file is for --devices 3 --microbatches 8: compare it for these"}
    files["zb-h1"].write_text("0: 0F0 0F0\n")
    assert "violation" in gapless(f"compare --schedules 1f1b,{mine}").err
    assert "there is no file" in gapless("compare --schedules 1f1b,nowhere.txt").err
