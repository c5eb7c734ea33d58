"""A head start: so many forwards, then one for each backward. 1f1b and what came of it are rows of this kind."""

from collections.abc import Iterable, Sequence

from gapless.schedule.action import Action


def one_ahead_of_each(forwards: Sequence[Action], w: int, groups: Iterable[Iterable[Action]]) -> tuple[Action, ...]:
    """A row of w forwards, then one more before each of the groups as long as there are any."""
    row = list(forwards[:w])
    for number, group in enumerate(groups):
        row += [*forwards[number + w : number + w + 1], *group]
    return tuple(row)


def forwards_ahead(replicas: Sequence[int]) -> list[int]:
    """How many forwards a replica of each stage runs before its first backward: of the minibatches that the devices
    after it, and its own other replicas, have under way, its share.
    """
    return [(sum(replicas[stage:]) - 1) // count for stage, count in enumerate(replicas)]
