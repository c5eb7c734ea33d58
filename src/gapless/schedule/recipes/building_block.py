"""The V schedules with less memory are one block, repeated: when each device runs Fa, Fb, Ib and Ia of one microbatch.

The block fixes the lifetime of an activation, hence the memory. Repeated every 6 slots it leaves holes at both ends;
F and I move into them where what they depend on is there and the device's peak does not rise. The W are then laid
into what is idle at the real costs, the oldest first, or where memory is full.
"""

from collections import deque
from collections.abc import Sequence

from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.costs import Costs, Number
from gapless.schedule.dependencies import dependencies, replay
from gapless.schedule.placement import vee
from gapless.schedule.simulate import Wires, simulate

_PERIOD = 6
_F, _I, _W = Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD


def repeat_block(
    name: str, slots: Sequence[tuple[int, int, int, int]], num_microbatches: int, peak: int, costs: Costs | None
) -> Schedule:
    """`slots`: per device the slots of Fa, Fb, Ib, Ia; `peak`: activations of one microbatch per device it may hold."""
    K = len(slots)
    planned: list[list[Action]] = []
    for device, (fa, fb, ib, ia) in enumerate(slots):
        a, b = device, 2 * K - 1 - device
        timed = [
            (slot + _PERIOD * m, Action(stage, kind, m))
            for m in range(num_microbatches)
            for slot, stage, kind in ((fa, a, _F), (fb, b, _F), (ib, b, _I), (ia, a, _I))
        ]
        planned.append([action for _, action in sorted(timed, key=lambda pair: pair[0])])
    order = Schedule(tuple(map(tuple, planned)), vee(K), name)
    costs = costs or Costs()
    # Moving ahead helps where the block is loose (v-half) and hurts where it is tight (v-min): the simulator decides.
    orders = (order, order.with_rows(_squeeze(order, 2 * peak)))
    filled = [_fill_with_weight_gradients(each, 2 * peak, costs) for each in orders]
    return min(filled, key=lambda schedule: simulate(schedule, costs).makespan)


def v_two_thirds(num_devices: int, num_microbatches: int, costs: Costs | None = None) -> Schedule:
    """Two thirds of 1f1b's memory, between zb-v and v-half: no recipe of its own, but what `auto` begins with where
    there is less memory than zb-v takes.
    """
    K = num_devices
    late = 2 if K % 3 == 2 else 0
    slots = [(2 * i, 4 * K - 3 - 2 * i, 4 * K - 2 + late + 2 * i, 8 * K - 5 + late - 2 * i) for i in range(K)]
    return repeat_block("v-two-thirds", slots, num_microbatches, (2 * K + 2) // 3, costs)


_Step = tuple[int, Kind]  # an action of whichever microbatch


def _needs(planned: Schedule) -> dict[_Step, list[_Step]]:
    """What each step depends on, all for the same microbatch."""
    steps = [(stage, kind) for stage in range(planned.num_stages) for kind in (_F, _I)]
    return {step: [need[:2] for need in dependencies(Action(*step, 0), planned)] for step in steps}


def _squeeze(planned: Schedule, limit: int) -> tuple[tuple[Action, ...], ...]:
    """Play the rows slot by slot; a device takes the first action that is ready and may go ahead of those before it."""
    left = [list(row) for row in planned.rows]
    held = [0] * planned.num_devices  # stage activations
    rows: list[list[Action]] = [[] for _ in left]
    needs = _needs(planned)
    ended = dict.fromkeys(needs, 0)  # microbatches: each step takes them in order
    while any(left):
        chosen = []
        for device, row in enumerate(left):
            index = _first_ready(row, held[device], limit, needs, ended)
            if index is not None:
                chosen.append((device, row.pop(index)))
        for device, action in chosen:
            held[device] += 1 if action.kind is _F else -1
            rows[device].append(action)
            ended[action[:2]] += 1
    return tuple(map(tuple, rows))


def _first_ready(
    row: list[Action], held: int, limit: int, needs: dict[_Step, list[_Step]], ended: dict[_Step, int]
) -> int | None:
    """The index of the first action that could run now without raising the peak of what it would go ahead of."""
    highest = held  # the most held over the prefix that a candidate would jump
    tried: set[_Step] = set()
    gradients = 0  # of those tried
    for index, (stage, kind, microbatch) in enumerate(row):
        step = (stage, kind)
        forward = kind is _F
        full = highest >= limit  # and so for every forward from here on
        if not (forward and full) and step not in tried:
            for need in needs[step]:
                if ended[need] <= microbatch:
                    break
            else:
                return index
            tried.add(step)
            gradients += not forward
        if gradients == 2 and (full or len(tried) == 4):
            return None
        held += 1 if forward else -1
        if held > highest:
            highest = held
    return None


def _fill_with_weight_gradients(order: Schedule, limit: int, costs: Costs) -> Schedule:
    """Play the rows at the real costs; a W goes where it fits before the next action, or where memory is full."""
    durations = costs.durations(order.placement)
    home = [order.placement.device(stage, 0) for stage in range(order.num_stages)]
    needs = _needs(order)
    # When what each step made was there: on its own device, and on that of the stage that waits for it.
    ends: dict[_Step, list[Number]] = {step: [] for step in needs}
    arrivals: dict[_Step, list[Number]] = {step: [] for step in needs}
    sources = {
        step: [(arrivals if home[need[0]] != home[step[0]] else ends)[need] for need in found]
        for step, found in needs.items()
    }
    wires = Wires(order, costs)
    free: list[Number] = [0] * order.num_devices
    held = [0] * order.num_devices
    waiting: list[deque[Action]] = [deque() for _ in order.rows]
    rows: list[list[Action]] = [[] for _ in order.rows]
    for device, action, _, _ in replay(order):
        stage, kind, microbatch = action
        start = free[device]
        for times in sources[stage, kind]:
            if times[microbatch] > start:
                start = times[microbatch]
        queue = waiting[device]
        while queue:
            end = free[device] + durations[_W][queue[0].stage]
            if end > start and not (kind is _F and held[device] == limit):
                break
            rows[device].append(queue.popleft())
            free[device] = end
            held[device] -= 1
        free[device] = end = max(start, free[device]) + durations[kind][stage]
        ends[stage, kind].append(end)
        arrival = wires.arrival(action, end)
        arrivals[stage, kind].append(end if arrival is None else arrival)
        rows[device].append(action)
        if kind is _F:
            held[device] += 1
        else:
            queue.append(Action(stage, _W, microbatch))
    return order.with_rows([*row, *queue] for row, queue in zip(rows, waiting, strict=True))
