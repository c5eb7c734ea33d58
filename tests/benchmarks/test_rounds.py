"""Contestants take turns, and what counts is the median."""

import pytest

from benchmarks.runner.rounds import median, ratio, take_turns, timed


def test_every_round_runs_all_and_turns_the_order_around() -> None:
    ran: list[str] = []

    def contestant(name: str) -> float:
        ran.append(name)
        return float(len(ran))

    seconds = take_turns({name: lambda name=name: contestant(name) for name in "ab"}, rounds=3)  # type: ignore[misc]
    assert "".join(ran) == "ba" + "ab" + "ba" + "ab"
    assert seconds == {"a": [3.0, 6.0, 7.0], "b": [4.0, 5.0, 8.0]}


def test_progress_names_the_round_and_is_wiped_away_at_the_end() -> None:
    lines: list[str] = []
    take_turns({"a": lambda: 1.0}, rounds=2, progress=lines.append)
    assert lines == ["warm-up: a", "round 1 of 2: a", "round 2 of 2: a", ""]


def test_a_ratio_compares_what_ran_in_the_same_round() -> None:
    assert ratio([2.0, 40.0, 6.0], [1.0, 20.0, 2.0]) == 2.0
    assert median([3.0, 1.0, 2.0]) == 2.0


def test_several_runs_in_a_row_count_as_their_mean() -> None:
    ran: list[int] = []
    seconds = timed(lambda: ran.append(1), times=4)()
    assert len(ran) == 4
    assert seconds == pytest.approx(0.0, abs=1.0)
