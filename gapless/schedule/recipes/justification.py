"""Push a schedule against its end, then back against its start: what was idle on the way is gone.

List scheduling is tight where it begins and loose where it ends: a W started in a short gap holds up the chain of I of the
last microbatches, and by the time the last I arrives no W is left to fill the wait. Double justification, known from project
scheduling, mends that. Take the actions by falling end and put each as late as its device, its followers and the memory
allow; then take them by rising start and put each as early as possible:

    as found          0: F F F I W I W . . I W      the last I arrives late, and nothing is left to fill the wait
    pushed right      0: . . F F F I I W W I W      the W do, the rest moves up behind them, and what it waits for, too
    pushed left       0: F F F I I W W I W          the idle time is gone

An action may go into any gap that is long enough, so it is never held up by one that comes after it in the list: by a W above
all. The list is the order of a schedule that fits, hence each action fits behind those before it, and so does the result.
"""

from collections.abc import Sequence

from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.costs import Number
from gapless.schedule.timeline import Timeline

_KINDS = (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
_Needs = list[list[tuple[int, float]]]  # per chain: how far away the number of a needed action is, and the hop to it


def justified(timeline: Timeline, memory_limit: Number | None, *, ends_together: bool) -> Schedule:
    """The timeline's schedule of F, I and W, pushed right and back left.

    ends_together: all devices may end as late as the last one; otherwise each as long after its own start as the longest does
    """
    problem = _Problem(timeline, memory_limit)
    count = len(problem.home) * problem.num_microbatches
    ends = problem.ends(timeline)
    release = [0.0 if ends_together else -float(starts[0]) for starts in timeline.starts]
    # Time runs backwards while pushing right: an action "ends" where it really starts.
    order = sorted(range(count), key=lambda action: -ends[action])
    _, starts = problem.place(order, problem.gives, -1, release)
    order = sorted(reversed(range(count)), key=lambda action: -starts[action])
    rows, _ = problem.place(order, problem.needs, 1, [0.0] * len(release))
    return timeline.schedule.with_rows(map(problem.action, row) for row in rows)


class _Problem:
    """The costs as plain numbers: floats, since only the order counts here and the simulator has the last word on it.

    An action is a number, chain * M + microbatch; a chain, kind * S + stage, runs in the order of microbatches.
    """

    def __init__(self, timeline: Timeline, memory_limit: Number | None) -> None:
        schedule, costs = timeline.schedule, timeline.costs
        placement = self.placement = schedule.placement
        assert placement.single is not None and schedule.kinds <= set(_KINDS)
        S = placement.num_stages
        self.num_microbatches = schedule.num_microbatches
        self.home = placement.single * len(_KINDS)
        durations = costs.durations(placement)
        self.durations = [float(time) for kind in _KINDS for time in durations[kind]]
        held = [float(size) for size in costs.per_stage("activation", placement)]
        kept = [min(map(float, pair)) for pair in zip(costs.per_stage("kept_for_weight_grad", placement), held)]
        self.takes = [*held, *(k - h for k, h in zip(kept, held, strict=True)), *(-k for k in kept)]
        self.limit = float("inf") if memory_limit is None else float(memory_limit) * (1 + 1e-12)
        self.needs: _Needs = [[] for _ in self.home]
        self.gives: _Needs = [[] for _ in self.home]
        for s in range(S):
            self._link(s, S + s)
            self._link(S + s, 2 * S + s)
            if s + 1 < S:
                hop = float(costs.latency) if self.home[s] != self.home[s + 1] else 0.0
                self._link(s, s + 1, hop)
                self._link(S + s + 1, S + s, hop)

    def _link(self, before: int, after: int, hop: float = 0.0) -> None:
        away = (after - before) * self.num_microbatches
        self.needs[after].append((-away, hop))
        self.gives[before].append((away, hop))

    def ends(self, timeline: Timeline) -> list[float]:
        S, M = self.placement.num_stages, self.num_microbatches
        base = {kind: i * S for i, kind in enumerate(_KINDS)}
        found = [0.0] * (len(self.home) * M)
        for row, ends in zip(timeline.schedule.rows, timeline.ends, strict=True):
            for (stage, kind, microbatch), end in zip(row, ends, strict=True):
                found[(base[kind] + stage) * M + microbatch] = float(end)
        return found

    def action(self, number: int) -> Action:
        chain, microbatch = divmod(number, self.num_microbatches)
        kind, stage = divmod(chain, self.placement.num_stages)
        return Action(stage, _KINDS[kind], microbatch)

    def place(
        self, order: Sequence[int], needs: _Needs, sign: int, release: Sequence[float]
    ) -> tuple[list[list[int]], list[float]]:
        """Each action in turn as early as it can start: the rows, and when each action ends."""
        M, home, durations = self.num_microbatches, self.home, self.durations
        takes = [sign * size for size in self.takes]
        slack = 1e-9 * max(durations)  # a gap that is too short by rounding alone is long enough
        rows = []
        for device, stages in enumerate(self.placement.stages):
            shortest = min(durations[chain] for chain in range(len(home)) if home[chain] == device)
            rows.append(_Row(release[device], max(shortest - slack, slack), slack, self.limit))
        ends = [0.0] * len(order)
        chain_ends = [release[device] for device in home]
        for action in order:
            chain = action // M
            ready = chain_ends[chain]
            for away, hop in needs[chain]:
                arrival = ends[action + away] + hop
                if arrival > ready:
                    ready = arrival
            end = rows[home[chain]].place(action, ready, durations[chain], takes[chain])
            ends[action] = chain_ends[chain] = end
        return [row.actions for row in rows], ends


class _Row:
    """A device's row while it fills up, in its gaps as well as at its end."""

    __slots__ = ("actions", "free", "gaps", "levels", "limit", "shortest", "slack")

    def __init__(self, free: float, shortest: float, slack: float, limit: float) -> None:
        self.free, self.shortest, self.slack, self.limit = free, shortest, slack, limit
        self.actions: list[int] = []
        self.levels = [0.0]  # what is held before each action, and after the last
        self.gaps: list[tuple[float, float, int]] = []  # from when, to when, and how many actions come before

    def place(self, action: int, ready: float, duration: float, takes: float) -> float:
        """Returns when the action ends."""
        levels, slack = self.levels, self.slack
        for number, (begin, end, index) in enumerate(self.gaps):
            start = begin if begin > ready else ready
            # It must start well before the gap ends, or one that takes no time might go ahead of what it needs.
            if start + duration > end + slack or start >= end - slack:
                continue
            if takes > 0 and max(levels[index:]) + takes > self.limit:
                continue
            self._insert(number, start, start + duration, action, takes)
            return start + duration
        start = self.free
        if ready > start:
            if ready - start > self.shortest:
                self.gaps.append((start, ready, len(self.actions)))
            start = ready
        self.actions.append(action)
        levels.append(levels[-1] + takes)
        self.free = start + duration
        return self.free

    def _insert(self, number: int, start: float, stop: float, action: int, takes: float) -> None:
        begin, end, index = self.gaps[number]
        self.actions.insert(index, action)
        self.levels.insert(index, self.levels[index])
        self.levels[index + 1 :] = [level + takes for level in self.levels[index + 1 :]]
        left = [(begin, start, index)] if start - begin > self.shortest else []
        right = [(stop, end, index + 1)] if end - stop > self.shortest else []
        later = [(begin, end, index + 1) for begin, end, index in self.gaps[number + 1 :]]
        self.gaps[number:] = left + right + later
