"""What is wrong at one place of a schedule, and how it is shown."""

from dataclasses import dataclass

from gapless.schedule.action import Schedule


@dataclass(frozen=True)
class Violation:
    """A rule that does not hold at one place of the schedule: the `position`-th action of a device's row."""

    rule: str
    device: int
    position: int
    message: str


def excerpt(schedule: Schedule, violation: Violation, reach: int = 4) -> str:
    """The part of the device's row around the place, with a mark under it."""
    row = schedule.rows[violation.device]
    first = max(0, violation.position - reach)
    tokens = [str(action) for action in row[first : violation.position + reach + 1]]
    head = f"    {violation.device}: " + ("... " if first else "")
    at = violation.position - first
    if at >= len(tokens):  # something is missing
        tokens.append("?")
    lead = len(head) + sum(len(token) + 1 for token in tokens[:at])
    tail = " ..." if violation.position + reach + 1 < len(row) else ""
    return f"{head}{' '.join(tokens)}{tail}\n{' ' * lead}{'^' * len(tokens[at])}"
