"""What devices cost each other where they share one machine: the interpreter's lock, caches, memory.

Stages are measured alone and beside each other, and how many times as long they take then is one number for each kind
of action. Where there are more devices than processors, they take turns.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gapless.schedule.action import Kind, Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.simulate import simulate
from gapless.schedule.unrolled import Unrolled, unrolled


@dataclass(frozen=True)
class Contention:
    """How many times as long a forward (F, R), a whole backward (B), and one in halves (I, W) take beside others.

    at_once  how many devices the machine has processors for; where more want to run they take turns. None: for all
    """

    forward: float = 1.0
    backward: float = 1.0
    halves: float = 1.0
    at_once: float | None = None

    def costs(self, alone: Costs, schedule: Schedule, replicas: int = 1) -> Costs:
        """Those of stages that run this schedule, from the costs of each stage alone. So many replicas run it beside
        each other, and share the processors.
        """
        if self == ALONE or schedule.num_devices * replicas == 1:
            return alone
        turns = 1.0
        if self.at_once is not None:
            shared = shared_makespan(schedule, alone, self.at_once / replicas)
            turns = shared / float(simulate(schedule, alone).makespan)
        durations = alone.durations(schedule.placement)

        def longer(kind: Kind, times: float) -> tuple[float, ...]:
            return tuple(turns * times * float(seconds) for seconds in durations[kind])

        return replace(
            alone,
            forward=longer(Kind.FORWARD, self.forward),
            recompute=longer(Kind.RECOMPUTE, self.forward),
            backward=longer(Kind.BACKWARD, self.backward),
            input_grad=longer(Kind.INPUT_GRAD, self.halves),
            weight_grad=longer(Kind.WEIGHT_GRAD, self.halves),
        )


def shared_makespan(schedule: Schedule, costs: Costs, processors: float) -> float:
    """How long a step takes where so many processors are shared equally by all devices that have something to run.

    While a pipeline fills and empties few have, and processors stand idle: a step takes longer than its work shared
    out. All devices that run are equally fast, so one clock counts for them (`work`: what each has done since the
    start), beside the real one on which messages travel.
    """
    flat = unrolled(schedule)
    if flat is None:
        busy = float(sum(simulate(schedule, costs).busy))
        return max(float(simulate(schedule, costs).makespan), busy / processors)
    durations = [float(each) for kind in Kind for each in costs.durations(schedule.placement)[kind]]
    transits = [float(each) for each in costs.transits(schedule.placement)]
    return _Shared(flat, schedule.num_devices, durations, float(costs.latency), transits, processors).run()


class _Shared:
    def __init__(
        self,
        flat: Unrolled,
        num_devices: int,
        durations: Sequence[float],
        latency: float,
        transits: Sequence[float],
        processors: float,
    ) -> None:
        self._flat, self._durations, self._latency, self._transits = flat, durations, latency, transits
        self._processors = processors
        self._rows: list[list[int]] = [[] for _ in range(num_devices)]
        for number, (device, _, _) in enumerate(flat.steps):
            self._rows[device].append(number)
        self._at = [0] * num_devices
        self._waits = [len(needs) for _, _, needs in flat.steps]
        self._takers: dict[int, list[int]] = defaultdict(list)
        for number, (_, _, needs) in enumerate(flat.steps):
            for need in needs:
                self._takers[need].append(number)
        self._running: list[tuple[float, int]] = []  # the work at which an action ends, and its device
        self._travelling: list[tuple[float, int]] = []  # the time at which what an action made arrives
        self._wires = [0.0] * flat.num_wires  # until when each is busy
        self._work = self._time = 0.0

    def run(self) -> float:
        for device in range(len(self._rows)):
            self._begin(device)
        end = 0.0
        while self._running or self._travelling:
            rate = min(1.0, self._processors / len(self._running)) if self._running else 1.0
            ends = self._time + (self._running[0][0] - self._work) / rate if self._running else math.inf
            if self._travelling and self._travelling[0][0] < ends:
                when, number = heapq.heappop(self._travelling)
                self._work += max(0.0, when - self._time) * rate if self._running else 0.0
                self._time = max(self._time, when)
                self._arrive(number)
                continue
            self._work, device = heapq.heappop(self._running)
            self._time = end = ends
            number = self._rows[device][self._at[device]]
            self._at[device] += 1
            leaves = ends
            if (wire := self._flat.wires[number]) is not None:  # one message at a time
                leaves = self._wires[wire[0]] = max(ends, self._wires[wire[0]]) + self._transits[wire[1]]
            if number in self._takers:
                heapq.heappush(self._travelling, (leaves + self._latency, number))
            self._begin(device)
        return end

    def _begin(self, device: int) -> None:
        """The next action of a device, if all that it needs is there."""
        if self._at[device] < len(self._rows[device]):
            number = self._rows[device][self._at[device]]
            if not self._waits[number]:
                heapq.heappush(self._running, (self._work + self._durations[self._flat.steps[number][1]], device))

    def _arrive(self, number: int) -> None:
        for taker in self._takers[number]:
            self._waits[taker] -= 1
            device = self._flat.steps[taker][0]
            at = self._at[device]
            if not self._waits[taker] and at < len(self._rows[device]) and self._rows[device][at] == taker:
                self._begin(device)


ALONE = Contention()
