"""Which version of its weights a forward sees, where a schedule updates them on the way.

An update makes the next version of its stage's weights. A backward uses the version that its forward saw, so that one
is kept till then, whatever was updated since.

    newest       the newest that there is when the forward begins: PipeDream's weight stashing
    one behind   always that of the minibatch before: 2BW, whose minibatches have several microbatches
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gapless.schedule.action import BACKWARDS, Action, Kind, Schedule
from gapless.schedule.violation import Violation

Seen = dict[tuple[int, int], int]  # the version that the forward of a stage and microbatch sees
_USES = frozenset({Kind.FORWARD, Kind.RECOMPUTE, Kind.WEIGHT_GRAD}) | BACKWARDS


@dataclass(frozen=True)
class WeightVersions:
    """What forwards see, by stage and microbatch; the most versions that a device of each stage keeps at once; and how
    many updates come at most between what a gradient was computed with and what it changes.
    """

    seen: Mapping[tuple[int, int], int]
    kept: tuple[int, ...]
    behind: tuple[int, ...]


def weight_versions(schedule: Schedule) -> WeightVersions:
    """One behind where a minibatch has several microbatches, and else the newest."""
    seen = _seen(schedule, _newest(schedule))
    kept = [1] * schedule.num_stages
    behind = [0] * schedule.num_stages
    for row in schedule.rows:
        for stage, (count, late) in _of_row(row, seen).items():
            kept[stage], behind[stage] = max(kept[stage], count), max(behind[stage], late)
    return WeightVersions(seen, tuple(kept), tuple(behind))


def _newest(schedule: Schedule) -> Seen:
    """How many updates of its stage a device has made before each forward."""
    found: Seen = {}
    for row in schedule.rows:
        made: dict[int, int] = {}
        for stage, kind, microbatch in row:
            if kind is Kind.UPDATE:
                made[stage] = made.get(stage, 0) + 1
            elif kind is Kind.FORWARD:
                found[stage, microbatch] = made.get(stage, 0)
    return found


def _seen(schedule: Schedule, newest: Seen) -> Seen:
    """By the rule of pipedream, or of 2bw."""
    if Kind.VERDICT in schedule.kinds or not schedule.num_microbatches > schedule.num_minibatches > 1:
        return newest
    per_minibatch = schedule.num_microbatches // schedule.num_minibatches
    return {(stage, microbatch): max(0, microbatch // per_minibatch - 1) for stage, microbatch in newest}


def _of_row(row: tuple[Action, ...], seen: Mapping[tuple[int, int], int]) -> dict[int, tuple[int, int]]:
    """By stage, the most versions at once, and the most updates behind."""
    last: dict[tuple[int, int], int] = {}  # by stage and version, where it is used last
    for position, (stage, kind, microbatch) in enumerate(row):
        if kind in _USES:
            last[stage, seen.get((stage, microbatch), 0)] = position
    found: dict[int, tuple[int, int]] = {}
    alive: dict[int, dict[int, int]] = {}  # by stage the versions there are, with their last use
    for position, (stage, kind, microbatch) in enumerate(row):
        versions = alive.setdefault(stage, {0: last.get((stage, 0), -1)})
        most, late = found.get(stage, (1, 0))
        if kind is Kind.UPDATE:
            newest = max(versions) + 1
            alive[stage] = versions = {v: end for v, end in versions.items() if end > position}
            versions[newest] = last.get((stage, newest), -1)
            most = max(most, len(versions))
        elif kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
            late = max(late, max(versions) - seen.get((stage, microbatch), 0))
        found[stage] = most, late
    return found


def unmade_versions(schedule: Schedule) -> Iterator[Violation]:
    """Forwards that come before the update that makes what they are to see."""
    newest = _newest(schedule)
    seen = _seen(schedule, newest)
    for device, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            stage, kind, microbatch = action
            if kind is Kind.FORWARD and seen[stage, microbatch] > newest[stage, microbatch]:
                version = seen[stage, microbatch]
                message = f"{action} uses version {version} of its weights, but {stage}U{version - 1} comes later"
                yield Violation("order", device, position, message)
