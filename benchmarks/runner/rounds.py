"""Contestants take turns: every round runs each of them once, in the opposite order of the round before."""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gapless.checkpoint.disk import replace_file
from gapless.errors import ConfigError, TransportError

Contestant = Callable[[], float]  # runs once and says how many seconds that took
Progress = Callable[[str], None]
Taken = dict[str, list[float]]  # the seconds of each contestant, round by round


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


def within(progress: Progress, at: str) -> Progress:
    """The progress of a part of something: each line says which."""
    return lambda line: progress(f"{at}: {line}" if line else at)


def take_turns(
    contestants: Mapping[str, Contestant],
    rounds: int,
    progress: Progress = silent,
    warmup: int = 1,
    steps: int = 1,
    kept: "KeptRounds | None" = None,
    needed: bool = False,
) -> Taken:
    """The seconds of each contestant, without those that gave up, unless all are `needed`; warm-up rounds come first
    and do not count. A round is the median of its steps: one that something else on this machine has disturbed does not
    count. With `kept` it goes on from the rounds that are there, and ends early where the time is over.
    """
    kept = kept or KeptRounds(None, {}, 0)
    seconds = kept.begun(contestants)
    done = min(map(len, seconds.values()), default=0)
    for number in (*range(-warmup, 0), *range(done, rounds)) if done < rounds else ():
        names = list(seconds)
        for name in names if number % 2 == 0 else reversed(names):
            progress(f"round {number + 1} of {rounds}: {name}" if number >= 0 else f"warm-up: {name}")
            try:
                taken = median([contestants[name]() for _ in range(steps)])
            except GaveUpError:
                if needed:
                    raise
                del seconds[name]
                kept.facts.setdefault("gave up", []).append(name)
                continue
            if number >= 0:
                seconds[name].append(taken)
        if number >= 0:
            kept.write()
            if kept.is_time_over:
                break
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


def fight(
    ours: Contestant, other: str, theirs: Contestant, rounds: int, progress: Progress, *, warmup: int = 1
) -> dict[str, Any]:
    """Two contestants: the median seconds of both, `gains`: how many times as long the other one takes in each round,
    and `ratio`: the median of these.
    """
    seconds = take_turns({"gapless": ours, other: theirs}, rounds, progress, warmup, needed=True)
    mine, its = seconds["gapless"], seconds[other]
    found = {"seconds": median(mine), f"{other}_seconds": median(its), "gains": quotients(its, mine)}
    return {**found, "ratio": ratio(its, mine), "rounds": seconds}


def best(seconds: Taken) -> dict[str, Any]:
    """Our quickest contestant and torch's, how much faster ours is, and a sentence of it, where both have one."""
    sides = [{name: seconds[name] for name in seconds if name.startswith(by)} for by in ("gapless", "torch ")]
    if not all(sides):
        return {"faster": None, "verdict": ()}
    mine, theirs = (min(side, key=lambda name: median(side[name])) for side in sides)
    faster = ratio(seconds[theirs], seconds[mine])
    verdict = (f"{mine} is faster than torch's best ({theirs}) by {faster:.2f}x",)
    return {"best": mine, "best_of_torch": theirs, "faster": faster, "verdict": verdict}


def median(values: Sequence[float]) -> float:
    """What counts of several rounds."""
    return statistics.median(values)


def quotients(values: Sequence[float], to: Sequence[float]) -> list[float]:
    """Round by round."""
    return [mine / other for mine, other in zip(values, to, strict=True)]


def ratio(values: Sequence[float], to: Sequence[float]) -> float:
    """The median of the rounds' quotients: both sides of each met the same moment of the machine."""
    return median(quotients(values, to))


def write_whole(file: Path, values: Mapping[str, Any]) -> None:
    """As JSON, whole or not at all."""
    replace_file(file, (json.dumps(values, indent=1) + "\n").encode())


class KeptRounds:
    """The rounds of a long contest, and other facts, in a file: the same command goes on where it ended. `settings` say
    which contest it is: a file that keeps those of another one is refused. Without a file nothing is kept.
    """

    def __init__(self, file: Path | None, settings: Mapping[str, Any], minutes: float) -> None:
        self._file, self._settings = file, json.loads(json.dumps(settings))
        self._until = time.monotonic() + 60 * minutes
        self._seconds: Taken = {}
        self.facts: dict[str, Any] = {}  # that need not be found out again
        if file is None or not file.exists() or not file.stat().st_size:
            return
        try:
            found = json.loads(file.read_text())
            settings, self._seconds, self.facts = found["settings"], found["seconds"], found["facts"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{file} does not keep rounds of a benchmark: give another file") from None
        for name in sorted({*settings, *self._settings}):
            there, here = settings.get(name), self._settings.get(name)
            if there != here:
                raise ConfigError(
                    f"{file} keeps rounds with {name} = {there}, and this is {here}: give another file, or delete it"
                )

    def begun(self, contestants: Iterable[str]) -> Taken:
        """The rounds so far of those that have not given up, which grow from here on."""
        names = [name for name in contestants if name not in self.facts.get("gave up", ())]
        if self._seconds and self._seconds.keys() != set(names):
            raise ConfigError(f"{self._file} keeps rounds of other contestants: give another file, or delete it")
        self._seconds = self._seconds or {name: [] for name in names}
        return self._seconds

    @property
    def is_time_over(self) -> bool:
        """Whether to stop for now: only what is kept is not lost by that."""
        return self._file is not None and time.monotonic() > self._until

    def write(self) -> None:
        """If there is a file."""
        if self._file is not None:
            write_whole(self._file, {"settings": self._settings, "seconds": self._seconds, "facts": self.facts})
