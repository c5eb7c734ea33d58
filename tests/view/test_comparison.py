"""Schedules ranked, from Python."""

import pytest

import gapless
from gapless.errors import ScheduleError


def test_they_are_ranked_and_can_be_looked_up() -> None:
    found = gapless.compare(["gpipe", "zb-v", "1f1b", "pipedream"], devices=4, microbatches=8)
    assert [timeline.name for timeline in found] == ["zb-v", "1f1b", "gpipe", "pipedream"]
    assert found.best.makespan == found["zb-v"].makespan == min(timeline.makespan for timeline in found.ranked)
    assert [row["rank"] for row in found.rows()] == [1, 2, 3, None]
    assert "* shortest makespan" in str(found)
    with pytest.raises(KeyError, match="'zb-h1' was not compared"):
        found["zb-h1"]


def test_what_does_not_fit_is_left_out_with_the_reason() -> None:
    found = gapless.compare(devices=4, microbatches=8, memory_limit="1x")
    assert set(found.refused) | {timeline.name for timeline in found} == set(gapless.schedules()) - {"optimal"}
    assert all(max(timeline.peak) <= 4 for timeline in found)
    with pytest.raises(KeyError, match="its peak of 8 is above the limit of 4"):
        found["gpipe"]
    with pytest.raises(ScheduleError, match=r"no schedule fits a memory limit of 0\.1"):
        gapless.compare(devices=4, microbatches=8, memory_limit=0.1)
    with pytest.raises(ScheduleError, match="did you mean zb-v"):
        gapless.compare(["zbv"], devices=4, microbatches=8)


def test_a_peak_on_the_limit_fits_whatever_its_floats_add_up_to() -> None:
    """Seven times 0.1 are 0.7000000000000001 in another order: zb-v was left out, and `auto` was slower."""
    costs = gapless.Costs(activation=0.1)
    found = gapless.compare(["zb-v", "auto"], devices=7, microbatches=12, costs=costs, memory_limit="1x")
    assert found["zb-v"].makespan == found["auto"].makespan == 39
    found = gapless.compare(["zb-v", "v-half"], devices=7, microbatches=12, costs=costs, memory_limit=0.699)
    assert found.refused == {"zb-v": "its peak of 0.7 is above the limit of 0.699"}


def test_a_timeline_shows_itself_in_three_lines() -> None:
    shown = repr(gapless.compare(["1f1b"], devices=2, microbatches=4).best)
    assert shown.splitlines() == [
        "Timeline of 1f1b: 2 devices, 2 stages, 4 microbatches, 16 actions",
        "  makespan 15, span 15, work 12; bubble 20.0%, span bubble 20.0%",
        "  peak of each device: 2, 1",
    ]


def test_what_auto_costs_in_memory_is_told_against_1f1b() -> None:
    costs = gapless.Costs(latency=1)
    found = gapless.compare(["auto", "zb-v"], devices=4, microbatches=16, costs=costs)
    assert (
        "auto needs 4 times the memory of 1f1b (peak 16 instead of 4) and 62% of its makespan; a memory limit of 1x "
        "keeps it to 1f1b's"
    ) in str(found).splitlines()
    assert "auto needs" not in str(gapless.compare(["auto"], devices=4, microbatches=8, memory_limit="1x"))


def test_what_is_no_name_of_a_schedule_is_told_where_it_goes() -> None:
    schedule = gapless.make_schedule("1f1b", devices=2, microbatches=2)
    with pytest.raises(ScheduleError, match=r"given by its name, as '1f1b'; gapless\.simulate takes one of your own"):
        gapless.compare([schedule], devices=2, microbatches=2)  # type: ignore[list-item]
    with pytest.raises(ScheduleError, match=r"'mine\.txt' is a file, and here a schedule is given by its name"):
        gapless.compare(["mine.txt"], devices=2, microbatches=2)
