"""Costs -> Timeline: what a schedule would take, before anybody pays for it.

Every action starts as soon as its device is free and what it depends on is there. What comes from another device
arrives a hop later: `latency` after it was sent, and where a bandwidth is given after it has gone through the link,
one message at a time. Where transfers are written out, a message leaves once it is sent and its receive is posted
(where a bandwidth is given, receives count as posted in time).
"""

from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.costs import Costs, Number
from gapless.schedule.dependencies import Milestones, replay
from gapless.schedule.timeline import Timeline


def simulate(schedule: Schedule, costs: Costs | None = None, name: str = "") -> Timeline:
    """Raises ScheduleError for a schedule that would hang."""
    costs = costs or Costs()
    durations = costs.durations(schedule.placement)
    latency = costs.latency
    milestones = Milestones(schedule)
    receives = milestones.first_receive if schedule.has_transfers else milestones.size
    there: list[Number] = [0] * milestones.size  # when each milestone is there on its own device ...
    home = [-1] * milestones.size  # ... which is this one; -1: what the schedule does without
    links = _Links(schedule, costs) if costs.bandwidth is not None else None
    free: list[Number] = [0] * schedule.num_devices
    starts: list[list[Number]] = [[] for _ in schedule.rows]
    ends: list[list[Number]] = [[] for _ in schedule.rows]
    for device, action, needs, gives in replay(schedule, milestones):
        microbatch = action.microbatch
        start = free[device]
        for base in needs:
            number = base + microbatch
            when = there[number]
            source = home[number]
            if source >= 0 and (source != device or number >= receives):
                when = links.arrivals.get(number, when) if links else when + latency
            if when > start:
                start = when
        end = start + durations[action.kind][action.stage]
        free[device] = end
        starts[device].append(start)
        ends[device].append(end)
        for base in gives:
            there[base + microbatch] = end
            home[base + microbatch] = device
        if links:
            links.ended(action, gives[0] + microbatch, device, end)
    return Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)), costs, name or schedule.name)


class _Links:
    """One wire per pair of devices and direction; a device's messages leave in the order it made them."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        assert costs.bandwidth is not None
        self.placement = schedule.placement
        self.latency = costs.latency
        self.transit = tuple(size / costs.bandwidth for size in costs.per_stage("boundary", schedule.placement))
        self.free: dict[tuple[int, int], Number] = {}
        self.arrivals: dict[int, Number] = {}  # by milestone
        if schedule.has_transfers:
            self.direction = {Kind.SEND_ACTIVATION: 1, Kind.SEND_GRADIENT: -1}
        else:
            self.direction = {Kind.FORWARD: 1, Kind.INPUT_GRAD: -1, Kind.BACKWARD: -1}

    def ended(self, action: Action, number: int, device: int, end: Number) -> None:
        other = action.stage + self.direction.get(action.kind, 0)
        if other == action.stage or not 0 <= other < self.placement.num_stages:
            return
        target = self.placement.device(other, action.microbatch)
        if target == device:
            return
        # What crosses a boundary has the size of the later stage's input, whichever way it goes.
        leaves = max(end, self.free.get((device, target), 0)) + self.transit[max(action.stage, other)]
        self.free[device, target] = leaves
        self.arrivals[number] = leaves + self.latency
