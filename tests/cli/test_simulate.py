"""`gapless simulate`: what a schedule costs, for people and for programs."""

import json
from pathlib import Path

import pytest

from gapless.schedule.recipes import make_schedule
from tests.cli.conftest import Command


def test_json_is_one_object_with_these_keys_and_values(gapless: Command) -> None:
    code, out, err = gapless("simulate zb-v --devices 4 --microbatches 8 --json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "schedule": "zb-v",
        "devices": 4,
        "stages": 8,
        "placement": "vee",
        "microbatches": 8,
        "minibatches": 1,
        "makespan": 25.5,
        "span": 24,
        "work": 24,
        "bubble": 0.0588235294118,
        "span_bubble": 0,
        "busy": [24, 24, 24, 24],
        "idle": [1.5, 1.5, 1.5, 1.5],
        "peak": [4, 4, 4, 4],
        "actions": 192,
    }


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "interleaved", "dualpipe-v"])
def test_the_bubbles_are_shares_of_makespan_and_span(gapless: Command, name: str) -> None:
    found = json.loads(gapless(f"simulate {name} --weight-grad 0.7 --latency 0.1 --json").out)
    assert found["bubble"] == pytest.approx((found["makespan"] - found["work"]) / found["makespan"])
    assert found["span_bubble"] == pytest.approx((found["span"] - found["work"]) / found["span"])
    assert len(found["peak"]) == found["devices"]


def test_people_get_the_numbers_and_a_table_of_devices(gapless: Command) -> None:
    assert gapless("simulate 1f1b --devices 2 --microbatches 2").out == (
        "1f1b: 2 devices, 2 stages (line), 2 microbatches, 8 actions\n"
        "\n"
        "makespan           9   bubble  33.3%   first start of all to last end of all\n"
        "span               9   bubble  33.3%   own first start to own last end, the longest\n"
        "work               6                   busy time of the busiest device\n"
        "\n"
        "device  busy  idle  peak\n"
        "     0     6     3     2\n"
        "     1     6     3     1\n"
    )


def test_single_numbers_are_per_device_and_lists_per_stage(gapless: Command) -> None:
    once = json.loads(gapless("simulate zb-v -K 2 -M 4 --forward 2 --json").out)
    listed = json.loads(gapless("simulate zb-v -K 2 -M 4 --forward 1,1,1,1 --json").out)
    assert once == listed


def test_what_is_kept_for_the_weight_gradient_is_all_of_it_unless_said(gapless: Command) -> None:
    whole = json.loads(gapless("simulate zb-h1 --activation 10 --json").out)
    assert whole["peak"] == [40, 40, 40, 40]
    part = json.loads(gapless("simulate zb-h1 --activation 10 --kept-for-weight-grad 1 --json").out)
    assert part["peak"] == [40, 31, 22, 13]


def test_an_endless_schedule_reports_its_steady_pace(gapless: Command) -> None:
    found = json.loads(gapless("simulate 2bw --devices 4 --microbatches 8 --minibatches 6 --json").out)
    assert (found["microbatches"], found["minibatches"]) == (8, 6)
    assert found["period"] == 24
    assert found["throughput"] == pytest.approx(1 / 24)
    assert "period" in gapless("simulate pipedream").out


@pytest.mark.parametrize(("when", "makespan"), [("early", 41), ("late", 44)])
def test_an_early_recompute_is_cheaper_than_a_late_one(gapless: Command, when: str, makespan: int) -> None:
    found = json.loads(gapless(f"simulate gpipe --recompute 1 --remat {when} --json").out)
    assert found["makespan"] == makespan


def test_many_devices_get_no_table(gapless: Command) -> None:
    out = gapless("simulate 1f1b --devices 65 --microbatches 2").out
    assert "device  busy" not in out
    assert "the most a device holds" in out


def test_a_schedule_above_the_memory_limit_is_refused_with_both_numbers(gapless: Command) -> None:
    code, out, err = gapless("simulate gpipe --devices 4 --microbatches 8 --memory-limit 4")
    assert (code, out) == (2, "")
    told = (
        "gapless: gpipe does not fit: its peak of 8 is above the limit of 4; `gapless compare` with the same limit "
        "shows what does\n"
    )
    assert err == told
    code, out, err = gapless("show gpipe --devices 4 --microbatches 8 --memory-limit 4 --format text")
    assert (code, out.splitlines()[0][:7], err) == (0, "0: 0F0 ", told)  # it was drawn without a word
    assert gapless("show gpipe --devices 4 --microbatches 8 --memory-limit 8").err == ""


def test_sizes_of_a_file_are_not_overridden_silently(gapless: Command, tmp_path: Path) -> None:
    file = tmp_path / "two.txt"
    file.write_text(make_schedule("1f1b", devices=2, microbatches=4).text())
    assert gapless(f"simulate {file} --devices 2 --microbatches 4")[0] == 0
    for option in ("--devices", "--microbatches"):
        code, _, err = gapless(f"simulate {file} {option} 16")
        assert code == 2
        assert "is a schedule of 2 devices, 2 stages, 4 microbatches, 16 actions, not 16" in err


def test_what_waits_on_the_host_is_shown(gapless: Command) -> None:
    offloads = "--offload --host-bandwidth 1.5"
    assert ["on the host" in gapless(f"simulate 1f1b --devices 4 --fuse {more}")[1] for more in ("", offloads)] == [
        False,
        True,
    ]


def test_a_recompute_takes_as_long_as_a_forward_unless_told(gapless: Command) -> None:
    def makespan(options: str) -> float:
        return float(json.loads(gapless(f"simulate 1f1b --remat late --forward 2 {options} --json")[1])["makespan"])

    assert makespan("") == makespan("--recompute 2") > makespan("--recompute 0")


def test_copies_that_take_no_time_are_told(gapless: Command) -> None:
    assert "copies to the host take no time here" in gapless("simulate 1f1b --offload")[1]
    assert "copies" not in gapless("simulate 1f1b --offload --host-bandwidth 2")[1]
    assert "copies" not in gapless("simulate 1f1b")[1]
