"""The trace: valid for the viewers, and the same facts as the timeline."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gapless.errors import ConfigError, ScheduleError
from gapless.schedule.costs import Costs
from gapless.schedule.dependencies import dependencies
from gapless.schedule.recipes import make_schedule
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline
from gapless.view import perfetto
from tests.view.conftest import EVIL, later, timeline_of

Event = dict[str, Any]


def events(timelines: list[Timeline], phase: str, unit: str = "ms") -> list[Event]:
    return [event for event in perfetto.events(timelines, unit) if event["ph"] == phase]


def test_every_action_is_a_slice_of_its_device_in_microseconds(eight: list[Timeline]) -> None:
    slices = iter(events(eight, "X"))
    for process, timeline in enumerate(eight, 1):
        for device in range(timeline.schedule.num_devices):
            for action, start, end in timeline.spans(device):
                found = next(slices)
                assert (found["name"], found["pid"], found["tid"]) == (str(action), process, device + 1)
                assert found["ts"] == pytest.approx(float(start) * 1000)
                assert found["dur"] == pytest.approx(float(end - start) * 1000)
    assert next(slices, None) is None


@pytest.mark.parametrize(("unit", "microseconds"), [("s", 1e6), ("ms", 1e3), ("us", 1), ("ns", 1e-3)])
def test_the_unit_of_cost_can_be_chosen(unit: str, microseconds: float) -> None:
    assert events([timeline_of("1f1b", costs=Costs())], "X", unit)[0]["dur"] == microseconds


def test_arrows_join_exactly_the_dependencies_between_devices(eight: list[Timeline]) -> None:
    for timeline in eight:
        schedule = timeline.schedule
        crossing = 0
        for device, row in enumerate(schedule.rows):
            for action in row:
                needs = dependencies(action, schedule)
                crossing += sum(schedule.placement.device(n.stage, n.microbatch) != device for n in needs)
        starts, ends = events([timeline], "s"), events([timeline], "f")
        assert len(starts) == len(ends) == crossing
        assert all(end["bp"] == "e" for end in ends)


def test_arrows_have_ids_of_their_own_and_touch_the_inside_of_their_slices(eight: list[Timeline]) -> None:
    starts, ends, slices = events(eight, "s"), events(eight, "f"), events(eight, "X")
    ids = [event["id"] for event in starts]
    assert len(set(ids)) == len(ids)
    assert ids == [event["id"] for event in ends]
    for start, end in zip(starts, ends, strict=True):
        assert start["ts"] < end["ts"]
        assert (start["pid"], start["name"], start["cat"]) == (end["pid"], end["name"], end["cat"])
    for event in starts[::7] + ends[::7]:
        around = [s for s in slices if (s["pid"], s["tid"]) == (event["pid"], event["tid"])]
        assert sum(s["ts"] < event["ts"] < s["ts"] + s["dur"] for s in around) == 1


def test_counters_follow_the_memory_to_its_peak_and_back_to_nothing() -> None:
    timeline = timeline_of("zb-v")
    counters = events([timeline], "C")
    for device, peak in enumerate(timeline.peak):
        held = [event for event in counters if event["name"] == f"memory of device {device}"]
        assert max(event["args"]["held"] for event in held) == float(peak)
        assert held[-1]["args"]["held"] == 0
        assert all(before["ts"] < after["ts"] for before, after in pairwise(held))
        assert all(before["args"] != after["args"] for before, after in pairwise(held))


def test_processes_and_threads_are_named() -> None:
    named = events([timeline_of("zb-v"), timeline_of("1f1b", label=EVIL)], "M")
    processes = [event["args"]["name"] for event in named if event["name"] == "process_name"]
    threads = [event["args"]["name"] for event in named if event["name"] == "thread_name"]
    assert processes == ["zb-v", EVIL]
    assert threads[0] == "device 0 (stages 0, 7)"
    assert threads[4] == "device 0 (stage 0)"


def test_the_file_is_the_trace(eight: list[Timeline], tmp_path: Path) -> None:
    perfetto.write(tmp_path / "trace.json", eight, unit="us")
    assert json.loads((tmp_path / "trace.json").read_text("utf-8")) == {
        "displayTimeUnit": "ms",
        "traceEvents": list(perfetto.events(eight, unit="us")),
    }


def test_a_timeline_is_traced_from_its_own_start() -> None:
    assert events([later(timeline_of("1f1b"), 64)], "X")[0]["ts"] == 0


def test_bad_arguments_are_refused_with_a_sentence() -> None:
    with pytest.raises(ConfigError, match="unit is 'h', but a unit of time is one of s, ms, us, ns"):
        perfetto.events([timeline_of("1f1b")], unit="h")
    with pytest.raises(ScheduleError, match="there is no timeline to trace"):
        perfetto.events([])


def test_a_large_trace_is_told_of_and_one_that_no_browser_opens_is_refused(tmp_path: Path) -> None:
    # Two million actions were 778 MB without a word.
    made = simulate(make_schedule("1f1b", devices=4, microbatches=250))
    assert made.schedule.num_actions == 2000
    assert perfetto.about_its_size([made]) is None
    assert perfetto.about_its_size([made] * 1000) == (
        "2,000,000 actions make a trace of about 763 MiB, which ui.perfetto.dev opens slowly: use --html, "
        "which draws millions in a small file, or fewer microbatches"
    )
    file = tmp_path / "trace.json"
    with pytest.raises(
        ScheduleError, match=r"6,000,000 actions would make a trace of about 2,289 MiB, .* than 2,048 MiB"
    ):
        perfetto.write(file, [made] * 3000)
    assert not file.exists()
    perfetto.write(file, [made])
    assert 0.5 < file.stat().st_size / (2000 * 400) < 1.5
