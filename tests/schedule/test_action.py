"""A schedule is a value: it prints as text, CSV and JSON, and parses back exactly or says where it can't."""

import json

import pytest

from gapless.errors import ScheduleError
from gapless.schedule.action import Action, Kind, Schedule, parse_action
from gapless.schedule.placement import line, replicated, vee
from gapless.schedule.recipes import make_schedule

DRAWN = """\
0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"""


NO_ACTION = "is not an action; write stage, letter, microbatch, as in 2F0 or 3SEND_B1"
NO_ROWS = 'the JSON has no "rows": it needs a list of actions per device, as in {"rows": [["0F0", "0B0"]]}'


def message_of(text: str) -> str:
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse(text)
    return str(caught.value)


@pytest.mark.parametrize("kind", Kind)
def test_an_action_of_every_kind_prints_and_parses(kind: Kind) -> None:
    action = Action(12, kind, 345)
    assert str(action) == f"12{kind.value}345"
    assert parse_action(str(action)) == action


def test_the_text_form_is_one_line_per_device() -> None:
    schedule = Schedule.parse(DRAWN)
    assert schedule == make_schedule("1f1b", devices=3, microbatches=4)
    assert str(schedule) == schedule.text() == DRAWN


def test_the_csv_form_is_nothing_but_the_actions() -> None:
    assert make_schedule("1f1b", devices=2, microbatches=2).csv() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_empty_csv_cells_are_idle_slots_and_an_empty_line_is_a_device_without_actions() -> None:
    assert Schedule.parse("0F0,,0B0,\n,1F0,1B0\n") == Schedule.parse("0: 0F0 0B0\n1: 1F0 1B0")
    assert Schedule.parse("0F0,0B0\n\n").rows == ((Action(0, Kind.FORWARD, 0), Action(0, Kind.BACKWARD, 0)), ())


def test_the_json_form_says_what_it_is() -> None:
    schedule = make_schedule("zb-h1", devices=1, microbatches=1)
    assert schedule.to_json() == {
        "schedule": "zb-h1",
        "devices": 1,
        "stages": 1,
        "microbatches": 1,
        "rows": [["0F0", "0I0", "0W0"]],
    }
    parsed = Schedule.parse(json.dumps(schedule.to_json()))
    assert parsed == schedule
    assert parsed.name == "zb-h1"


def test_equal_rows_make_equal_schedules_whatever_their_names() -> None:
    schedule = make_schedule("1f1b", devices=1, microbatches=2)
    assert schedule == make_schedule("naive", devices=1, microbatches=2) == schedule.renamed("mine")
    assert hash(schedule) == hash(schedule.renamed("mine"))
    assert len({schedule, schedule.renamed("mine"), Schedule.parse(schedule.text())}) == 1
    assert schedule != make_schedule("gpipe", devices=1, microbatches=2)


def test_a_stage_lives_where_its_actions_are() -> None:
    assert Schedule.parse(DRAWN).placement == line(3)
    assert make_schedule("zb-v", devices=3, microbatches=2).placement == vee(3)
    assert Schedule.parse(make_schedule("zb-v", devices=3, microbatches=2).text()).placement == vee(3)
    drawn = "0: 0F0 0B0\n1: 0F1 0B1\n2: 1F0 1B0 1F1 1B1"
    assert Schedule.parse(drawn).placement == replicated([2, 1])


def test_updates_count_minibatches_not_microbatches() -> None:
    schedule = Schedule.parse("0: 0F0 0F1 0B0 0B1 0U0 0F2 0F3 0B2 0B3 0U1")
    assert schedule.num_microbatches == 4
    assert schedule.num_minibatches == 2
    assert Schedule.parse("0: 0F0 0B0").num_minibatches == 1


def test_white_space_and_blank_lines_do_not_matter_in_text() -> None:
    assert Schedule.parse("\n  0 :  0F0   0B0  \r\n\n1:\t1F0 1B0\n\n") == Schedule.parse("0: 0F0 0B0\n1: 1F0 1B0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0: 0F0 0B0\n1: 1F0 2F0garbage", f"line 2: '2F0garbage' {NO_ACTION}"),
        ("0F0,0B0\n1F0,1X0", f"line 2: '1X0' {NO_ACTION}"),
        ('{"rows": [["0F0", "0B0"], ["F0"]]}', f"row 1: 'F0' {NO_ACTION}"),
        ("0: 0F0 0B0\n2: 1F0 1B0", "line 2: device 2 where device 1 was expected; they go 0, 1, 2, ... in order"),
        ("0: 0F0 0B0\n1F0 1B0", "line 2: '1F0 1B0' does not start with a device and a colon, as in `0: 0F0 0B0`"),
        ("", "the schedule is empty: it needs one line per device, as in `0: 0F0 0B0`"),
        (" \n \n", "the schedule is empty: it needs one line per device, as in `0: 0F0 0B0`"),
        ("0:", "stage 0 has no action, so it is on no device: stages are 0, 1, 2, ... without gaps"),
        ("0: 0F0 0B0 2F0 2B0", "stage 1 has no action, so it is on no device: stages are 0, 1, 2, ... without gaps"),
        ("0: 0F0 0B7", "microbatch 7 in a schedule of 2 actions: numbers are 0, 1, 2, ... without gaps"),
        ("0: 0F0 999999999B0", "stage 999999999 in a schedule of 2 actions: numbers are 0, 1, 2, ... without gaps"),
        ('{"rows": 3}', NO_ROWS),
        ('{"rows": [[0]]}', NO_ROWS),
        ('{"rows": []}', "stage 0 has no action, so it is on no device: stages are 0, 1, 2, ... without gaps"),
    ],
)
def test_a_parse_error_names_the_line_and_the_token(text: str, message: str) -> None:
    assert message_of(text) == message


@pytest.mark.parametrize("text", ['{"rows": [["0F0"', "{" * 100_000, '{"rows": ' + "[" * 100_000])
def test_truncated_json_is_refused_in_one_sentence(text: str) -> None:
    assert message_of(text).startswith("the schedule is not valid JSON: ")


@pytest.mark.parametrize(
    "token", ["", "2F", "F0", "2f0", "-1F0", "2F-1", "2 F0", "2F0 ", "2FF0", "1234567890F0", "٢F0", "2SEND_W1"]
)
def test_only_stage_letter_microbatch_is_an_action(token: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action"):
        parse_action(token)


def test_a_long_wrong_token_is_cut_in_the_message() -> None:
    assert "'" + "9" * 37 + "...'" in message_of("0: " + "9" * 10_000)


def test_lines_that_begin_with_a_hash_are_comments() -> None:
    text = "# my schedule\n0: 0F0 0B0\n  # the last stage\n1: 1F0 1B0\n"
    assert Schedule.parse(text) == Schedule.parse("0: 0F0 0B0\n1: 1F0 1B0")
    csv = "# my schedule\r\n0F0,,0B0\r\n  # the last stage\r\n,1F0,1B0\r\n"  # each comment was a device
    assert Schedule.parse(csv) == Schedule.parse(text)
    with pytest.raises(ScheduleError, match="line 4: 'x' is not an action"):
        Schedule.parse(csv.replace("1F0", "x"))
