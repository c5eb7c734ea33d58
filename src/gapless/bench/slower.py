"""What got slower since an earlier run: what lies wholly on the worse side of what its rounds were."""

from collections.abc import Mapping
from typing import NamedTuple

from gapless.bench.outcome import Figure, Outcome, between, shown


class Slower(NamedTuple):
    """One figure, before and now."""

    part: str
    before: Figure
    now: Figure

    def __str__(self) -> str:
        was, now = (f"{shown(each.value, each.unit)} ({between(each)})" for each in (self.before, self.now))
        return f"{self.part}, {self.now.name}: {now}, it was {was}"


def slower(before: Mapping[str, Outcome], now: Mapping[str, Outcome]) -> list[Slower]:
    """By more than the rounds spread: their intervals do not overlap. Only what ran alike on the same processor."""
    found = []
    for part, outcome in now.items():
        earlier = before.get(part)
        if earlier is None or earlier.command != outcome.command or not same_machine(earlier, outcome):
            continue
        known = {figure.name: figure for figure in earlier.figures}
        found += [
            Slower(part, known[figure.name], figure)
            for figure in outcome.figures
            if figure.name in known and _worse(known[figure.name], figure)
        ]
    return found


def same_machine(one: Outcome, other: Outcome) -> bool:
    """As far as an environment tells."""
    return all(one.environment.get(name) == other.environment.get(name) for name in ("cpu", "cores", "gpu"))


def _worse(before: Figure, now: Figure) -> bool:
    if before.low is None or before.high is None or now.low is None or now.high is None or before.unit != now.unit:
        return False
    if now.better == "less":
        return now.low > before.high
    return now.better == "more" and now.high < before.low
