"""Contestants take turns: every round runs each of them once, in the opposite order of the round before."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gapless.errors import TransportError

Contestant = Callable[[], float]  # runs once and says how many seconds that took
Progress = Callable[[str], None]


class GaveUpError(TransportError):
    """A contestant can't go on; the others do."""


class Span(NamedTuple):
    """When something was measured that is a part of what was run."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def silent(_: str) -> None:
    """No progress at all."""


def take_turns(
    contestants: Mapping[str, Contestant], rounds: int, progress: Progress = silent, warmup: int = 1
) -> dict[str, list[float]]:
    """The seconds of each contestant, round by round; warm-up rounds come first and do not count. Without those that
    gave up.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(-warmup, rounds):
        names = list(seconds)
        for name in names if number % 2 == 0 else reversed(names):
            progress(f"round {number + 1} of {rounds}: {name}" if number >= 0 else f"warm-up: {name}")
            try:
                taken = contestants[name]()
            except GaveUpError:
                del seconds[name]
                continue
            if number >= 0:
                seconds[name].append(taken)
    progress("")
    return seconds


def timed(work: Callable[[], object], times: int = 1) -> Contestant:
    """The mean time of one of several runs in a row."""

    def run() -> float:
        start = time.perf_counter()
        for _ in range(times):
            work()
        return (time.perf_counter() - start) / times

    return run


def finals(
    contestants: Mapping[str, Contestant],
    seeded: Sequence[str],
    finalists: int,
    rounds: int,
    progress: Progress = silent,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The seconds of all, which run twice; then those of the seeded ones and the quickest few, which run for longer."""
    first = take_turns(contestants, 2, progress)
    quickest = sorted(first, key=lambda name: min(first[name]))[:finalists]
    last = {name: contestants[name] for name in dict.fromkeys([*seeded, *quickest])}
    return first, take_turns(last, rounds, progress, warmup=0)


def median(values: Sequence[float]) -> float:
    """What counts of several rounds."""
    return statistics.median(values)


def ratio(values: Sequence[float], to: Sequence[float]) -> float:
    """The median of the rounds' quotients: both sides of each met the same moment of the machine."""
    return statistics.median(mine / other for mine, other in zip(values, to, strict=True))
