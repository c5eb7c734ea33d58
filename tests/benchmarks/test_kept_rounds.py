"""A contest in parts."""

from pathlib import Path

import pytest

from benchmarks.runner.rounds import GaveUpError, KeptRounds, take_turns
from gapless.errors import ConfigError


def test_a_contest_goes_on_where_it_ended(tmp_path: Path) -> None:
    file, ran = tmp_path / "rounds.json", []

    def contestant(name: str, seconds: float) -> float:
        ran.append(name)
        return seconds

    contestants = {"a": lambda: contestant("a", 1.0), "b": lambda: contestant("b", 2.0)}
    first = KeptRounds(file, {"width": 8, "names": ("a", "b")}, minutes=0.0)
    first.facts["bubbles"] = {"a": 0.25}
    assert take_turns(contestants, 3, kept=first) == {"a": [1.0], "b": [2.0]}
    again = KeptRounds(file, {"width": 8, "names": ["a", "b"]}, minutes=1.0)
    assert again.facts == {"bubbles": {"a": 0.25}}
    assert take_turns(contestants, 3, kept=again) == {"a": [1.0] * 3, "b": [2.0] * 3}
    assert "".join(ran) == "baabbabaab"  # each part warms up, and every round turns the order around
    assert take_turns(contestants, 3, kept=again) == {"a": [1.0] * 3, "b": [2.0] * 3}
    assert len(ran) == 10


def test_who_gave_up_is_not_asked_again(tmp_path: Path) -> None:
    file = tmp_path / "rounds.json"

    def gives_up() -> float:
        raise GaveUpError("it failed")

    for rounds in (1, 3):
        kept = KeptRounds(file, {}, minutes=1.0)
        assert take_turns({"a": lambda: 1.0, "b": gives_up}, rounds, kept=kept) == {"a": [1.0] * rounds}


def test_without_a_file_all_rounds_run(tmp_path: Path) -> None:
    assert take_turns({"a": lambda: 1.0}, 3, kept=KeptRounds(None, {}, minutes=0.0)) == {"a": [1.0] * 3}


def test_rounds_of_something_else_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "rounds.json"
    take_turns({"a": lambda: 1.0}, 1, kept=KeptRounds(file, {"width": 8}, minutes=1.0))
    with pytest.raises(ConfigError, match="with width = 8, and this is 16: give another file"):
        KeptRounds(file, {"width": 16}, minutes=1.0)
    with pytest.raises(ConfigError, match="other contestants"):
        take_turns({"b": lambda: 1.0}, 1, kept=KeptRounds(file, {"width": 8}, minutes=1.0))
    file.write_text("something else")
    with pytest.raises(ConfigError, match="does not keep rounds"):
        KeptRounds(file, {"width": 8}, minutes=1.0)
