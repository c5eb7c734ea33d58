"""Two contestants and one ratio: what most benchmarks come down to."""

from typing import Any

from gapless.bench.report import milliseconds
from gapless.bench.rounds import Contestant, Progress, median, ratio, take_turns


def fight(
    ours: Contestant, other: str, theirs: Contestant, rounds: int, progress: Progress, *, warmup: int = 1
) -> dict[str, Any]:
    """The median seconds of both, and `ratio`: how many times as long the other one takes."""
    seconds = take_turns({"gapless": ours, other: theirs}, rounds, progress, warmup)
    return {
        "seconds": median(seconds["gapless"]),
        f"{other}_seconds": median(seconds[other]),
        "ratio": ratio(seconds[other], seconds["gapless"]),
        "rounds": seconds,
    }


def told(title: str, seconds: dict[str, float], *figures: tuple[str, str, str]) -> str:
    """The seconds of both by their names, then the figures that count: name, value, and what it is meant to be."""
    lines = [(name, f"{milliseconds(value, 2)}", "per step") for name, value in seconds.items()]
    lines += [(name, value, f"median of the rounds; meant: {meant}") for name, value, meant in figures]
    width = max(len(name) for name, _, _ in lines)
    return "\n".join([title, "", *(f"{name:<{width}}  {value:>10}  {note}" for name, value, note in lines)])
