"""A schedule unrolled: the actions of all devices in one list, each behind what it needs, with its needs as numbers.

The order does not depend on the costs, so it is found once, and simulating the same schedule with other costs takes a
fraction of the time. What comes from the same device is left out: it is there when the device is free.

    0: 0F0 0F1 0B0 0B1        number   0    1    2    3    4    5    6    7
    1: 1F0 1B0 1F1 1B1        action  0F0  0F1  1F0  1B0  1F1  1B1  0B0  0B1
                              needs              0         1         3    5
"""

from collections import deque
from typing import NamedTuple

from gapless.schedule.action import PER_MINIBATCH, Action, Kind, Schedule
from gapless.schedule.dependencies import Milestones, replay
from gapless.schedule.routes import MAKERS, Routes

_KINDS = tuple(Kind)
_MOST_ACTIONS = 200_000  # that are kept: a million would fill the memory


class Unrolled(NamedTuple):
    """Per action of the list.

    steps   its device, its place in a table of all kinds and stages, and the numbers of what it needs from elsewhere
    wires   None where nothing is sent; else the number of the wire and the stage whose input it is
    """

    steps: list[tuple[int, int, tuple[int, ...]]]
    wires: list[tuple[int, int] | None]
    num_wires: int


def unrolled(schedule: Schedule) -> Unrolled | None:
    """None where transfers, copies or updates are written out or a stage has replicas, and for a schedule that is too
    long to be kept. Raises DeadlockError for one that would hang.
    """
    written = schedule.has_transfers or schedule.has_copies or schedule.kinds & PER_MINIBATCH
    other = written or schedule.placement.single is None
    if other or schedule.num_actions > _MOST_ACTIONS:
        return None
    if "_unrolled" not in schedule.__dict__:
        schedule.__dict__["_unrolled"] = _unrolled(schedule)  # as functools.cached_property keeps its values
    found: Unrolled = schedule.__dict__["_unrolled"]
    return found


def _unrolled(schedule: Schedule) -> Unrolled:
    """Every stage has one home: what an action needs comes from elsewhere for all microbatches or for none. `replay` is
    written out here, which takes half of the time.
    """
    milestones, homes, stages = Milestones(schedule), schedule.placement.homes, schedule.num_stages
    routes, rows = Routes(schedule.placement), schedule.rows
    pairs: dict[tuple[int, int], int] = {}
    table: dict[Kind, list[_Step]] = {}
    for rank, kind in enumerate(_KINDS):
        if kind in schedule.kinds:
            table[kind] = []
            for stage in range(stages):
                needs = milestones.needs[kind][stage]
                away = tuple(base for base in needs if homes[milestones.action(base).stage] != homes[stage])
                route = routes.leaving(Action(stage, kind, 0)) if kind in MAKERS else None
                wire = None
                if route is not None and route.crosses:
                    wire = pairs.setdefault(route.channel[:2], len(pairs)), max(route.source, route.target)
                table[kind].append((needs, away, milestones.gives[kind][stage], rank * stages + stage, wire))
    done, maker = milestones.nothing_done(), [-1] * milestones.size
    steps: list[tuple[int, int, tuple[int, ...]]] = []
    wires: list[tuple[int, int] | None] = []
    waiting: dict[int, int] = {}  # the device that waits for a milestone: one, since a stage has one home
    position, runnable = [0] * len(rows), deque(range(len(rows)))
    nothing: tuple[int, ...] = ()
    while runnable:
        device = runnable.popleft()
        row = rows[device]
        for at in range(position[device], len(row)):
            stage, kind, microbatch = row[at]
            needs, away, gives, place, wire = table[kind][stage]
            for base in needs:
                if not done[base + microbatch]:
                    waiting[base + microbatch] = device
                    break
            else:
                for base in gives:
                    number = base + microbatch
                    done[number], maker[number] = 1, len(steps)
                    if number in waiting:
                        runnable.append(waiting.pop(number))
                sources = tuple([maker[base + microbatch] for base in away]) if away else nothing
                steps.append((device, place, sources))
                wires.append(wire)
                continue
            position[device] = at
            break
    if len(steps) < schedule.num_actions:
        deque(replay(schedule, milestones), maxlen=0)  # which tells where it hangs
    return Unrolled(steps, wires, len(pairs))


_Step = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int, tuple[int, int] | None]
