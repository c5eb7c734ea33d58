"""What got slower since an earlier run: what lies wholly on the worse side of what its rounds were."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.runner.outcome import Outcome
from benchmarks.runner.told import Figure


class Slower(NamedTuple):
    """One figure, before and now."""

    part: str
    before: Figure
    now: Figure

    def __str__(self) -> str:
        was, now = (f"{each} ({each.between})" for each in (self.before, self.now))
        return f"{self.part}, {self.now.name}: {now}, it was {was}"


class Comparison(NamedTuple):
    """What got slower, out of how many figures that were compared; and how many could not be, by the reason why."""

    worse: Sequence[Slower]
    compared: int
    apart: Mapping[str, int]

    def verdict(self, than: str) -> str:
        """A sentence, or the heading of a list. Silence about what was not compared would read as good news."""
        if self.compared == 0:
            why = ", ".join(self.apart) or "there are no figures"
            return f"nothing could be compared with {than}: {why}"
        figures = "1 figure" if self.compared == 1 else f"{self.compared} figures"
        total = self.compared + sum(self.apart.values())
        if self.worse:
            start = f"{len(self.worse)} of {figures} got slower than in {than}"
        else:
            start = f"nothing got slower than in {than}, of {figures} compared"
        if not self.apart:
            return start
        rest = ", ".join(f"{count} ({why})" for why, count in self.apart.items())
        return f"{start}; {total - self.compared} of {total} could not be compared: {rest}"


def slower(before: Mapping[str, Outcome], now: Mapping[str, Outcome]) -> Comparison:
    """By more than the rounds spread: their intervals do not overlap. Only what ran alike on the same processor."""
    worse, compared, apart = list[Slower](), 0, Counter[str]()
    for part, outcome in now.items():
        earlier = before.get(part)
        known = {figure.name: figure for figure in earlier.figures} if earlier else {}
        for figure in filter(_counts, outcome.figures):
            was = known.get(figure.name)
            if earlier is None or earlier.skipped:
                apart["the part was not run before"] += 1
            elif any(
                earlier.environment.get(name) != outcome.environment.get(name) for name in ("cpu", "cores", "gpu")
            ):
                apart["it ran on another machine"] += 1
            elif earlier.command != outcome.command:
                apart["it ran with other options"] += 1
            elif was is None or not _counts(was) or was.unit != figure.unit:
                apart["the figure is new"] += 1
            else:
                compared += 1
                if _worse(was, figure):
                    worse.append(Slower(part, was, figure))
    return Comparison(worse, compared, apart)


def _counts(figure: Figure) -> bool:
    """Whether it has rounds, and a side that is the better one."""
    return figure.low is not None and figure.high is not None and figure.better != ""


def _worse(before: Figure, now: Figure) -> bool:
    assert before.low is not None and before.high is not None and now.low is not None and now.high is not None  # noqa: PT018
    return now.low > before.high if now.better == "less" else now.high < before.low
