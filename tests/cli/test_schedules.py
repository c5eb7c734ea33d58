"""`gapless schedules`: the table."""

import json

from gapless.schedule.recipes import RECIPES
from tests.cli.conftest import Command


def test_every_recipe_has_a_line(gapless: Command) -> None:
    code, out, err = gapless("schedules")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["name", "placement", "makespan", "bubble", "peak", "note"]
    assert [line.split()[0] for line in lines[1 : 1 + len(RECIPES)]] == list(RECIPES)
    assert "K devices, M microbatches" in out


def test_json_has_the_same(gapless: Command) -> None:
    found = json.loads(gapless("schedules --json").out)["schedules"]
    assert [each["name"] for each in found] == list(RECIPES)
    assert {each["name"] for each in found if not each["synchronous"]} == {"pipedream", "2bw"}
    assert next(each for each in found if each["name"] == "zb-v")["stages_per_device"] == [2]
