"""One pass of list scheduling: whenever a device is free it takes the best action that is ready.

An input gradient goes first, since others wait for it; then a forward, if memory allows; a weight gradient fills the
rest. What is best beyond that depends on the costs, so the choice has a few knobs (`Policy`), and `auto` tries several
settings.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field

from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.costs import Costs, Number
from gapless.schedule.placement import Placement

_F, _I, _W = Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD


@dataclass(frozen=True)
class Policy:
    """The knobs.

    patience    a device waits, rather than start a W, for what is known to come within this share of the W's time
    head_start  microbatches a stage may be ahead, as a multiple of the stages after it; None: as many as memory allows
    backlog     weight gradients a device may put off in favour of a forward; None: any number
    oldest_first  of two stages' inputs the older microbatch goes first, not the later stage
    """

    patience: float = 0.5
    head_start: float | None = None
    backlog: int | None = None
    oldest_first: bool = False


@dataclass(slots=True)
class _Device:
    free: Number = 0
    held: Number = 0
    weights: deque[Action] = field(default_factory=deque)
    row: list[Action] = field(default_factory=list)


def greedy(
    placement: Placement, num_microbatches: int, costs: Costs, memory_limit: Number | None, policy: Policy
) -> Schedule | None:
    """None where the policy leads into a dead end or a single microbatch does not fit."""
    rows = _Pass(placement, num_microbatches, costs, memory_limit, policy).run()
    complete = sum(map(len, rows)) == 3 * placement.num_stages * num_microbatches
    return Schedule(tuple(map(tuple, rows)), placement, "auto") if complete else None


class _Pass:
    def __init__(self, placement: Placement, M: int, costs: Costs, limit: Number | None, policy: Policy) -> None:
        assert placement.single is not None
        S = placement.num_stages
        self.home, self.last, self.limit, self.policy = placement.single, S - 1, limit, policy
        self.hops = costs.hops(placement)
        self.durations = costs.durations(placement)
        self.activation = costs.per_stage("activation", placement)
        self.kept = costs.per_stage("kept_for_weight_grad", placement)
        self.devices = [_Device() for _ in range(placement.num_devices)]
        self.stages = [tuple(reversed(stages)) for stages in placement.stages]  # the later ones first
        self.done = {_F: [0] * S, _I: [0] * S}
        # When the next inputs of a stage are there, in microbatch order: known once their producer has started.
        self.inputs: dict[Kind, list[deque[Number]]] = {kind: [deque() for _ in range(S)] for kind in (_F, _I)}
        self.inputs[_F][0].extend([0] * M)
        # Room a forward must leave for the later stages on its device, or microbatches would block each other for ever.
        self.room = [
            self.activation[s] + sum(self.activation[later] for later in placement.stages[self.home[s]] if later > s)
            for s in range(S)
        ]
        head = policy.head_start
        self.ahead = [M if head is None else max(1, round(head * (S - s) / placement.share(s))) for s in range(S)]
        self.events: list[tuple[Number, int]] = [(0, device) for device in range(placement.num_devices)]

    def run(self) -> list[list[Action]]:
        events = self.events
        while events:
            now, index = heapq.heappop(events)
            device = self.devices[index]
            if device.free > now:
                continue  # it will look again when it is free
            stages = self.stages[index]
            if self.policy.oldest_first and len(stages) > 1:
                stages = tuple(sorted(stages, key=self.done[_I].__getitem__))
            action, wake = self._choose(device, stages, now)
            if action is not None:
                self._start(device, index, action, now)
            elif wake is not None:
                heapq.heappush(events, (wake, index))
        return [device.row for device in self.devices]

    def _choose(self, device: _Device, stages: tuple[int, ...], now: Number) -> tuple[Action | None, Number | None]:
        """The action to start now, or when to look again (None: when something arrives)."""
        soonest: Number | None = None
        for stage in stages:
            queue = self.inputs[_I][stage]
            if queue:
                if queue[0] <= now:
                    return Action(stage, _I, self.done[_I][stage]), None
                soonest = queue[0] if soonest is None else min(soonest, queue[0])
        forward: Action | None = None
        for stage in stages:
            queue = self.inputs[_F][stage]
            if queue and self._may_go_ahead(device, stage):
                if queue[0] <= now:
                    forward = Action(stage, _F, self.done[_F][stage])
                    break
                soonest = queue[0] if soonest is None else min(soonest, queue[0])
        weights, backlog = device.weights, self.policy.backlog
        if forward is not None and (backlog is None or len(weights) <= backlog):
            return forward, None
        if not weights:
            return forward, soonest
        if forward is None and soonest is not None:
            duration = self.durations[_W][weights[0].stage]
            if soonest < now + self.policy.patience * duration:
                return None, soonest
        return weights[0], None

    def _may_go_ahead(self, device: _Device, stage: int) -> bool:
        if self.limit is not None and device.held + self.room[stage] > self.limit:
            return False
        return self.done[_F][stage] - self.done[_I][stage] < self.ahead[stage]

    def _start(self, device: _Device, index: int, action: Action, now: Number) -> None:
        stage, kind, microbatch = action
        end = now + self.durations[kind][stage]
        device.free = end
        device.row.append(action)
        heapq.heappush(self.events, (end, index))
        if kind is _W:
            device.weights.popleft()
            device.held -= self.kept[stage]
            return
        self.inputs[kind][stage].popleft()
        self.done[kind][stage] += 1
        if kind is _F:
            device.held += self.activation[stage]
            if stage == self.last:
                self.inputs[_I][stage].append(end)
            else:
                self._hand_on(_F, stage + 1, end + self.hops[stage + 1])
        else:
            device.held -= self.activation[stage] - self.kept[stage]
            device.weights.append(Action(stage, _W, microbatch))
            if stage > 0:
                self._hand_on(_I, stage - 1, end + self.hops[stage])

    def _hand_on(self, kind: Kind, stage: int, arrival: Number) -> None:
        self.inputs[kind][stage].append(arrival)
        heapq.heappush(self.events, (arrival, self.home[stage]))
