"""Passes: from the schedule a recipe states to the one that is run.

Recipes keep I and W apart. Whether a pair runs as one B, where a recompute goes and what crosses between devices is
decided here, and where there is a choice the simulator makes it.
"""

from collections import defaultdict
from collections.abc import Collection

from gapless.schedule.action import BACKWARDS, Action, Kind, Schedule
from gapless.schedule.costs import Costs, Number
from gapless.schedule.simulate import simulate
from gapless.schedule.verify import Channel, messages, receive_buffers

_F, _B, _I, _W, _R = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.RECOMPUTE


def fuse(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Run an I and the W right behind it as one B where nobody waits for the gradient before the W has ended.

    No start moves: what was waited for is still there in time. One B costs less than an I and a W.
    """
    costs = costs or Costs()
    timeline = simulate(schedule, costs)
    placement = schedule.placement
    starts = {
        (action.stage, action.microbatch): start
        for row, times in zip(schedule.rows, timeline.starts, strict=True)
        for action, start in zip(row, times, strict=True)
        if action.kind in BACKWARDS
    }
    hops = costs.hops(placement)
    rows = []
    for device, row in enumerate(schedule.rows):
        fused: list[Action] = []
        for position, action in enumerate(row):
            stage, kind, microbatch = action
            before = fused[-1] if fused else None
            if kind is _W and before == Action(stage, _I, microbatch):
                crosses = stage > 0 and placement.device(stage - 1, microbatch) != device
                hop = hops[stage] if crosses else 0
                if stage == 0 or starts[stage - 1, microbatch] >= timeline.ends[device][position] + hop:
                    fused[-1] = Action(stage, _B, microbatch)
                    continue
            fused.append(action)
        rows.append(fused)
    made = schedule.with_rows(rows)
    return made if simulate(made, costs).makespan <= timeline.makespan else schedule


def split(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Run a B as I W and send in between, where that gains: the stage before need not wait for this one's weights."""
    costs = costs or Costs()
    rows = []
    for row in schedule.rows:
        halves: list[Action] = []
        for action in row:
            if action.kind is _B:
                halves += [Action(action.stage, _I, action.microbatch), Action(action.stage, _W, action.microbatch)]
            else:
                halves.append(action)
        rows.append(halves)
    made = fuse(schedule.with_rows(rows), costs)
    before, after = simulate(schedule, costs), simulate(made, costs)
    return made if (after.makespan, after.span) < (before.makespan, before.span) else schedule


def forward_only(schedule: Schedule) -> Schedule:
    """For inference: the forwards in their order."""
    return schedule.with_rows([action for action in row if action.kind is _F] for row in schedule.rows)


def add_recompute(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    stages: Collection[int] | None = None,
    memory_limit: Number | None = None,
    early: bool = True,
) -> Schedule:
    """Throw activations away after F and recompute them by an R before the backward.

    R needs its own F alone, so it runs while the gradient is still on its way; `early` also moves it ahead into idle
    time, as far as memory allows (`memory_limit`, or what the device holds at its peak anyway). Where the backward
    follows its F directly nothing is thrown away.
    """
    costs = costs or Costs()
    wanted = range(schedule.num_stages) if stages is None else stages
    rows = []
    for row in schedule.rows:
        made: list[Action] = []
        for action in row:
            stage, kind, microbatch = action
            again = kind in BACKWARDS and stage in wanted and (stage, microbatch) not in schedule.recomputed
            if again and (not made or made[-1] != Action(stage, _F, microbatch)):
                made.append(Action(stage, _R, microbatch))
            made.append(action)
        rows.append(made)
    late = schedule.with_rows(rows)
    return _moved_ahead(late, costs, memory_limit) if early else late


def _moved_ahead(schedule: Schedule, costs: Costs, memory_limit: Number | None) -> Schedule:
    """Each R into the first gap before it that it fits into, if the memory it then holds longer is there."""
    timeline = simulate(schedule, costs)
    duration = costs.durations(schedule.placement)[_R]
    activation = costs.per_stage("activation", schedule.placement)
    rows = []
    for device, row in enumerate(schedule.rows):
        held = [level for level, _ in timeline.memory[device]]
        limit = timeline.peak[device] if memory_limit is None else memory_limit
        starts, ends = timeline.starts[device], timeline.ends[device]
        forwards = {(a.stage, a.microbatch): i for i, a in enumerate(row) if a.kind is _F}
        recomputes = [i for i, action in enumerate(row) if action.kind is _R]
        ahead: dict[int, list[Action]] = defaultdict(list)  # position -> what goes before it
        gone: set[int] = set()
        position = 1
        for source in recomputes:
            stage, _, microbatch = row[source]
            position = max(position, forwards[stage, microbatch] + 1)
            while position < source:
                gap = starts[position] - ends[position - 1] - sum(duration[a.stage] for a in ahead[position])
                room = all(level + activation[stage] <= limit for level in held[position:source])
                if room and gap >= duration[stage] > 0:
                    ahead[position].append(row[source])
                    gone.add(source)
                    for i in range(position, source):
                        held[i] += activation[stage]
                    break
                position += 1
        rows.append([a for i, action in enumerate(row) for a in (*ahead[i], *(() if i in gone else (action,)))])
    made = schedule.with_rows(rows)
    return made if simulate(made, costs).makespan <= timeline.makespan else schedule


def add_updates(schedule: Schedule) -> Schedule:
    """A `U` for each stage right after its last weight gradient, unless the schedule has its own.

    Where a stage is on several devices the update waits for all of them. It is at the end of the row that has the last
    microbatch, so that nothing else waits there.
    """
    if Kind.UPDATE in schedule.kinds:
        return schedule
    rows = []
    for device, row in enumerate(schedule.rows):
        last = {action.stage: i for i, action in enumerate(row) if action.kind in (_B, _W)}
        due: dict[int, list[Action]] = defaultdict(list)
        for stage, position in last.items():
            cycle = schedule.placement.cycles[stage]
            if len(set(cycle)) == 1:
                due[position].append(Action(stage, Kind.UPDATE, 0))
            elif schedule.placement.device(stage, schedule.num_microbatches - 1) == device:
                due[len(row) - 1].append(Action(stage, Kind.UPDATE, 0))
        rows.append([a for i, action in enumerate(row) for a in (action, *due.get(i, ()))])
    return schedule.with_rows(rows)


def add_transfers(schedule: Schedule, spare_buffers: int = 1) -> Schedule:
    """Write out what crosses between devices: a SEND right behind its producer, a RECV as early as the pool has a
    buffer.

    The pool of a channel is what the deadlock proof asks for and `spare_buffers` more, so that receives are posted
    ahead.
    """
    if schedule.has_transfers:
        return schedule
    produced, consumed = messages(schedule)
    pools = receive_buffers(schedule)
    before: dict[int, list[Action]] = defaultdict(list)  # device -> receives posted at its start
    after: dict[Action, list[Action]] = defaultdict(list)  # by a consumer: the receive that takes over its buffer
    sends: set[tuple[int, int, str]] = set()
    for channel, numbers in produced.items():
        sends.update((stage, microbatch, channel[2]) for stage, microbatch in numbers)
        _post_receives(channel, numbers, consumed[channel], pools[channel] + spare_buffers, before, after)
    rows = []
    for device, row in enumerate(schedule.rows):
        made = list(before[device])
        for action in row:
            made.append(action)
            stage, kind, microbatch = action
            if kind is _F and (stage, microbatch, "activation") in sends:
                made.append(Action(stage, Kind.SEND_ACTIVATION, microbatch))
            elif kind in BACKWARDS and (stage, microbatch, "gradient") in sends:
                made.append(Action(stage, Kind.SEND_GRADIENT, microbatch))
            made += after.get(action, [])
        rows.append(made)
    return schedule.with_rows(rows)


def _post_receives(
    channel: Channel,
    produced: dict[tuple[int, int], int],
    consumers: list[tuple[tuple[int, int], Action]],
    pool: int,
    before: dict[int, list[Action]],
    after: dict[Action, list[Action]],
) -> None:
    """In the producer's order, whatever the order of the consumers: a channel has no other."""
    kind, step = (Kind.RECEIVE_ACTIVATION, 1) if channel[2] == "activation" else (Kind.RECEIVE_GRADIENT, -1)
    in_order = sorted(produced, key=produced.__getitem__)
    turn = {message: i for i, (message, _) in enumerate(consumers)}
    last = 0  # the turn by which every message that must be gone has been consumed
    for number, (stage, microbatch) in enumerate(in_order):
        receive = Action(stage + step, kind, microbatch)
        if number < pool:
            before[channel[1]].append(receive)
        else:
            last = max(last, turn[in_order[number - pool]])
            after[consumers[last][1]].append(receive)
