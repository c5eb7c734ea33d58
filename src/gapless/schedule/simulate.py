"""Costs -> Timeline: what a schedule would take, before anybody pays for it.

Every action starts as soon as its device is free and what it depends on is there. What comes from another device
arrives a hop later: `latency` after it was sent, and where a bandwidth is given after it has gone through the link,
one message at a time. Where transfers are written out, a message leaves once it is sent and its receive is posted
(where a bandwidth is given, receives count as posted in time). Copies to the host and back run beside: `host_copies`.
"""

from gapless.schedule.action import COPIES, Action, Kind, Schedule, check_schedule
from gapless.schedule.costs import Costs, Number
from gapless.schedule.dependencies import Milestones, replay
from gapless.schedule.host_copies import Links, in_time_order
from gapless.schedule.routes import MAKERS, SENDS, Routes
from gapless.schedule.timeline import Timeline
from gapless.schedule.unrolled import Unrolled, unrolled


def simulate(schedule: Schedule, costs: Costs | None = None, name: str = "") -> Timeline:
    """When each action starts and ends with these costs, as a Timeline. Without costs every forward, input gradient and
    weight gradient takes one unit of time. Raises ScheduleError for a schedule that would hang.
    """
    check_schedule(schedule, "simulate")
    costs = costs or Costs()
    flat = unrolled(schedule)
    starts, ends = _played(schedule, costs) if flat is None else _run(flat, schedule, costs)
    return Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)), costs, name or schedule.name)


_Times = tuple[list[list[Number]], list[list[Number]]]  # per device, when its actions start and end


def _run(flat: Unrolled, schedule: Schedule, costs: Costs) -> _Times:
    times = costs.durations(schedule.placement)
    durations = [duration for kind in Kind for duration in times[kind]]
    latency = costs.latency
    free: list[Number] = [0] * schedule.num_devices
    starts: list[list[Number]] = [[] for _ in schedule.rows]
    ends: list[list[Number]] = [[] for _ in schedule.rows]
    arrivals: list[Number] = []  # of what each action has made, on the device that waits for it
    if costs.bandwidth is None:
        for device, place, needs in flat.steps:
            start = free[device]
            for number in needs:
                when = arrivals[number]
                if when > start:
                    start = when
            free[device] = end = start + durations[place]
            starts[device].append(start)
            ends[device].append(end)
            arrivals.append(end + latency)
        return starts, ends
    transits = costs.transits(schedule.placement)
    busy: list[Number] = [0] * flat.num_wires
    for (device, place, needs), wire in zip(flat.steps, flat.wires, strict=True):
        start = free[device]
        for number in needs:
            when = arrivals[number]
            if when > start:
                start = when
        free[device] = end = start + durations[place]
        starts[device].append(start)
        ends[device].append(end)
        if wire is None:
            arrivals.append(end)
        else:
            link, stage = wire
            leaves = busy[link]
            busy[link] = leaves = (leaves if leaves > end else end) + transits[stage]
            arrivals.append(leaves + latency)
    return starts, ends


def _played(schedule: Schedule, costs: Costs) -> _Times:
    """The same for what is not unrolled: schedules that are too long, replicas, copies, and written updates and
    transfers."""
    durations = costs.durations(schedule.placement)
    latency = costs.latency
    milestones = Milestones(schedule)
    receives = milestones.first_receive if schedule.has_transfers else milestones.size
    there: list[Number] = [0] * milestones.size  # when each milestone is there on its own device ...
    home = [-1] * milestones.size  # ... which is this one; -1: what the schedule does without
    wires = Wires(schedule, costs) if costs.bandwidth is not None else None
    arrivals: dict[int, Number] = {}  # of what went through a link, by milestone
    free: list[Number] = [0] * schedule.num_devices
    starts: list[list[Number]] = [[] for _ in schedule.rows]
    ends: list[list[Number]] = [[] for _ in schedule.rows]
    links = Links(schedule, costs) if schedule.has_copies else None

    def earliest(device: int, action: Action, needs: tuple[int, ...]) -> Number:
        start = free[device]
        for base in needs:
            number = base + action.microbatch
            when = there[number]
            source = home[number]
            if source >= 0 and (source != device or number >= receives):
                when = arrivals.get(number, when) if wires else when + latency
            if when > start:
                start = when
        return start

    def reached(device: int, action: Action, needs: tuple[int, ...]) -> Number:
        """A copy is given to its link when the device gets to it."""
        return free[device] if action.kind in COPIES else earliest(device, action, needs)

    order = in_time_order(schedule, milestones, reached) if links else replay(schedule, milestones)
    for device, action, needs, gives in order:
        microbatch = action.microbatch
        start = earliest(device, action, needs)
        if links and action.kind in COPIES:
            start, end = links.copied(device, action, start)
        else:
            free[device] = end = start + durations[action.kind][action.stage]
        starts[device].append(start)
        ends[device].append(end)
        for base in gives:
            there[base + microbatch] = end
            home[base + microbatch] = device
        if wires and (arrival := wires.arrival(action, end)) is not None:
            arrivals[gives[0] + microbatch] = arrival
    return starts, ends


class Wires:
    """One wire per pair of devices and direction; a device's messages leave in the order it made them."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._routes = Routes(schedule.placement)
        self._latency = costs.latency
        self._transits = costs.transits(schedule.placement)
        self._free: dict[tuple[int, int], Number] = {}
        self._leaves = SENDS if schedule.has_transfers else MAKERS

    def arrival(self, action: Action, end: Number) -> Number | None:
        """When what `action` made is on the device of the stage that waits for it; None where nothing leaves. To be
        asked in the order of each device's row.
        """
        route = self._routes.leaving(action) if action.kind in self._leaves else None
        if route is None or not route.crosses:
            return None
        wire = route.channel[:2]
        leaves = max(end, self._free.get(wire, 0)) + self._transits[max(route.source, route.target)]
        self._free[wire] = leaves
        return leaves + self._latency
