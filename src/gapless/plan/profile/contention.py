"""What devices cost each other where they share one machine: the interpreter's lock, caches, memory.

Stages are measured alone and beside each other, and how many times as long they take then is one number for each kind
of action. Where there are more devices than processors, they take turns.
"""

import heapq
import math
from collections import defaultdict
from dataclasses import dataclass, replace

from gapless.schedule.action import Kind, Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.simulate import simulate
from gapless.schedule.unrolled import unrolled


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
        timeline = simulate(schedule, costs)
        return max(float(timeline.makespan), float(sum(timeline.busy)) / processors)
    durations = [float(each) for kind in Kind for each in costs.durations(schedule.placement)[kind]]
    transits, latency = [float(each) for each in costs.transits(schedule.placement)], float(costs.latency)
    rows: list[list[int]] = [[] for _ in schedule.rows]
    takers: dict[int, list[int]] = defaultdict(list)
    for number, (device, _, needs) in enumerate(flat.steps):
        rows[device].append(number)
        for need in needs:
            takers[need].append(number)
    waits = [len(needs) for _, _, needs in flat.steps]
    at = [0] * len(rows)  # the place of each device in its row
    running: list[tuple[float, int]] = []  # the work at which an action ends, and its device
    travelling: list[tuple[float, int]] = []  # the time at which what an action made arrives
    wires = [0.0] * flat.num_wires  # until when each is busy
    work = now = end = 0.0

    def begin(device: int) -> None:
        """The next action of a device, if all that it needs is there."""
        if at[device] < len(rows[device]) and not waits[number := rows[device][at[device]]]:
            heapq.heappush(running, (work + durations[flat.steps[number][1]], device))

    for device in range(len(rows)):
        begin(device)
    while running or travelling:
        rate = min(1.0, processors / len(running)) if running else 1.0
        ends = now + (running[0][0] - work) / rate if running else math.inf
        if travelling and travelling[0][0] < ends:
            when, number = heapq.heappop(travelling)
            work += max(0.0, when - now) * rate if running else 0.0
            now = max(now, when)
            for taker in takers[number]:
                waits[taker] -= 1
                device = flat.steps[taker][0]
                if not waits[taker] and rows[device][at[device] : at[device] + 1] == [taker]:
                    begin(device)
            continue
        work, device = heapq.heappop(running)
        now = end = leaves = ends
        number = rows[device][at[device]]
        at[device] += 1
        if (wire := flat.wires[number]) is not None:  # one message at a time
            leaves = wires[wire[0]] = max(ends, wires[wire[0]]) + transits[wire[1]]
        if number in takers:
            heapq.heappush(travelling, (leaves + latency, number))
        begin(device)
    return end


ALONE = Contention()
