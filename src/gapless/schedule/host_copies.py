"""Activations that wait in the host's memory: what O and L take of time and memory.

A device reaches an O or L in its row, gives it to its link to the host, and computes on. A link takes one copy at a
time each way, in the order in which they are given to it; devices of one host may share one.

    device   F0      F1      F2      B0 ...         a copy out holds the device's memory until it has ended,
    out        O0----- O1----                       a copy in from when it starts; the host's memory is held from the
    in                   L0------                   start of O to the end of L
"""

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from operator import itemgetter

from gapless.schedule.action import COPIES, Action, Kind, Schedule
from gapless.schedule.costs import Costs, Number
from gapless.schedule.dependencies import Milestones, Step, replay
from gapless.schedule.memory import Levels, changes

Times = Sequence[Sequence[Number]]  # per device, in the order of its row


def sizes(schedule: Schedule, costs: Costs) -> Callable[[Action], Number]:
    """What a copy moves: what the costs say; or the activations, and the kept input where these are recomputed."""
    if costs.offloaded is not None:
        given = costs.per_stage("offloaded", schedule.placement)
        return lambda copy: given[copy.stage]
    activation, boundary = (costs.per_stage(name, schedule.placement) for name in ("activation", "boundary"))
    again = schedule.recomputed
    return lambda copy: (boundary if (copy.stage, copy.microbatch) in again else activation)[copy.stage]


class Links:
    """Those between devices and their hosts. To be asked in the order of time."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._costs, self._size = costs, sizes(schedule, costs)
        self._free: dict[tuple[int, Kind], Number] = {}

    def copied(self, device: int, copy: Action, earliest: Number) -> tuple[Number, Number]:
        """When a copy starts and ends."""
        link = device // int(self._costs.host_share), copy.kind
        start = max(earliest, self._free.get(link, 0))
        self._free[link] = end = start + self._costs.copy_time(self._size(copy))
        return start, end


def in_time_order(
    schedule: Schedule, milestones: Milestones, start: Callable[[int, Action, tuple[int, ...]], Number]
) -> Iterator[Step]:
    """As `replay`, each action when it starts: `start` tells when from its device, itself and its needs."""
    rows, done = schedule.rows, milestones.nothing_done()
    position = [0] * len(rows)
    waiting: dict[int, list[int]] = {}
    heap: list[tuple[Number, int]] = []

    def push(device: int) -> None:
        """What a device does next goes among what can start, unless something is missing."""
        if position[device] < len(rows[device]):
            action = rows[device][position[device]]
            needs = milestones.needs_of(action)
            numbers = (base + action.microbatch for base in needs)
            missing = next((number for number in numbers if not done[number]), None)
            if missing is None:
                heappush(heap, (start(device, action, needs), device))
            else:
                waiting.setdefault(missing, []).append(device)

    for device in range(len(rows)):
        push(device)
    while heap:
        _, device = heappop(heap)
        action = rows[device][position[device]]
        gives = milestones.gives[action.kind][action.stage]
        yield device, action, milestones.needs_of(action), gives
        position[device] += 1
        woken = {device}
        for base in gives:
            done[base + action.microbatch] = 1
            woken.update(waiting.pop(base + action.microbatch, ()))
        for each in sorted(woken):
            push(each)
    if waiting:
        for _ in replay(schedule, milestones):  # which tells where it hangs
            pass


def levels(schedule: Schedule, costs: Costs, starts: Times, ends: Times) -> Levels:
    """Per device and action: what the device holds once it has started, and after it has ended."""
    size = sizes(schedule, costs)
    found = []
    for device, row in enumerate(changes(schedule, costs)):
        events: list[tuple[Number, int, int, Number]] = []  # when; copies out first, in last; which; by how much
        for number, (action, (takes, gives)) in enumerate(zip(schedule.rows[device], row, strict=True)):
            begin, end = starts[device][number], ends[device][number]
            if action.kind in COPIES:
                out = action.kind is Kind.OFFLOAD
                events.append((end, 0, number, -size(action)) if out else (begin, 2, number, size(action)))
            else:
                events += (begin, 1, number, takes), (end, 1, number, -gives)
        held: Number = 0
        seen: list[list[Number]] = [[] for _ in schedule.rows[device]]
        for _, _, number, change in sorted(events, key=lambda event: event[:2]):
            held += change
            seen[number].append(held)
        found.append(tuple((each[0], each[-1]) for each in seen))
    return tuple(found)


def host_levels(schedule: Schedule, costs: Costs, starts: Times, ends: Times) -> Levels:
    """The same of the host's memory: what a device has there."""
    size, found = sizes(schedule, costs), []
    for row, begin, end in zip(schedule.rows, starts, ends, strict=True):
        out = [(begin[n], n, size(a)) for n, a in enumerate(row) if a.kind is Kind.OFFLOAD]
        back = [(end[n], n, -size(a)) for n, a in enumerate(row) if a.kind is Kind.LOAD]
        held: Number = 0
        seen: list[tuple[Number, Number]] = [(0, 0)] * len(row)
        for _, number, change in sorted(out + back, key=itemgetter(0, 2)):
            before, held = held, held + change
            seen[number] = (held, held) if change > 0 else (before, held)
        found.append(tuple(seen))
    return tuple(found)
