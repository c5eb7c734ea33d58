"""Activations that are thrown away after F, and made again by an R before the backward."""

from collections import defaultdict
from collections.abc import Collection

from gapless.schedule.action import BACKWARDS, Action, Kind, Schedule
from gapless.schedule.costs import Costs, Number
from gapless.schedule.simulate import simulate

_F, _R = Kind.FORWARD, Kind.RECOMPUTE


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
