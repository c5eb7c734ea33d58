"""What an action allocates and frees: the one copy.

F  takes the activations of its stage, or only the stage's input where the microbatch is recomputed
R  takes the activations then
I  gives back all but what W needs
W  gives back that, and the kept input;   B gives back everything

For inference, where nothing runs backward, F gives back what it took. What copies to the host take and give back
depends on when they run: `host_copies` has it.
"""

from collections.abc import Iterator

from gapless.schedule.action import BACKWARDS, Kind, Schedule
from gapless.schedule.costs import Costs, Number


def changes(schedule: Schedule, costs: Costs) -> Iterator[Iterator[tuple[Number, Number]]]:
    """Per device, for each action of its row: what it takes when it starts, and what it gives back when it ends."""
    placement = schedule.placement
    activation = costs.per_stage("activation", placement)
    kept = costs.per_stage("kept_for_weight_grad", placement)
    boundary = costs.per_stage("boundary", placement)
    recomputed = schedule.recomputed
    inference = schedule.kinds.isdisjoint(BACKWARDS)
    nothing: tuple[Number, Number] = (0, 0)
    # One shared pair per (kind, stage), so that a million actions cost a million look-ups and no arithmetic.
    stages = range(placement.num_stages)
    table: dict[tuple[Kind, int], tuple[Number, Number]] = {}
    again: dict[tuple[Kind, int], tuple[Number, Number]] = {}
    for s in stages:
        table[Kind.FORWARD, s] = (activation[s], activation[s] if inference else 0)
        table[Kind.BACKWARD, s] = (0, activation[s])
        table[Kind.INPUT_GRAD, s] = (0, activation[s] - kept[s])
        table[Kind.WEIGHT_GRAD, s] = (0, kept[s])
        table[Kind.RECOMPUTE, s] = (activation[s], 0)
        again[Kind.FORWARD, s] = (boundary[s], 0)
        again[Kind.BACKWARD, s] = (0, activation[s] + boundary[s])
        again[Kind.WEIGHT_GRAD, s] = (0, kept[s] + boundary[s])

    def row_changes(device: int) -> Iterator[tuple[Number, Number]]:
        for stage, kind, microbatch in schedule.rows[device]:
            if recomputed and (stage, microbatch) in recomputed and (kind, stage) in again:
                yield again[kind, stage]
            else:
                yield table.get((kind, stage), nothing)

    return (row_changes(device) for device in range(schedule.num_devices))


def peaks(schedule: Schedule, costs: Costs) -> tuple[Number, ...]:
    """The most each device holds at any time. A device runs one action at a time, so the order alone decides."""
    rows = changes(schedule, costs)
    return tuple(max((held for held, _ in _levels(row)), default=0) for row in rows)


def fits(peak: Number, limit: Number | None) -> bool:
    """Whether it is within the limit, where there is one. Sums of floats vary with their order, so a hair above is."""
    return limit is None or float(peak) <= float(limit) * (1 + 1e-9)


Levels = tuple[tuple[tuple[Number, Number], ...], ...]


def levels(schedule: Schedule, costs: Costs) -> Levels:
    """Per device and action: what is held while it runs, and after it has ended."""
    return tuple(tuple(_levels(row)) for row in changes(schedule, costs))


def _levels(row: Iterator[tuple[Number, Number]]) -> Iterator[tuple[Number, Number]]:
    held: Number = 0
    for takes, gives in row:
        held += takes
        yield held, held - gives
        held -= gives
