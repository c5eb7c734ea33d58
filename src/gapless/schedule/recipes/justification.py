"""Push a schedule against its end, then back against its start: what was idle on the way is gone.

List scheduling is tight where it begins and loose where it ends: a W started in a short gap holds up the chain of I of
the last microbatches, and by the time the last I arrives no W is left to fill the wait. Double justification, known
from project scheduling, mends that. Take the actions by falling end and put each as late as its device, its followers
and the memory allow; then take them by rising start and put each as early as possible:

    as found        0: F F F I W I W . . I W
    pushed right    0: . . F F F I I W W I W      the W fill the wait, and everything else moves up behind them
    pushed left     0: F F F I I W W I W

An action may go into any gap that is long enough, so it is never held up by one that comes after it in the list, a W
above all. The list is the order of a schedule that fits, so each action fits behind those before it, and so does the
result.
"""

from bisect import bisect_left
from collections.abc import Sequence
from operator import itemgetter

from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.costs import Number
from gapless.schedule.timeline import Timeline

_KINDS = (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
_Needs = list[list[tuple[int, float]]]  # per chain: how far away the number of a needed action is, and the hop to it

_END = itemgetter(1)


def justified(timeline: Timeline, memory_limit: Number | None, *, ends_together: bool) -> Schedule:
    """The timeline's schedule, of F, I and W, pushed right and back left.

    ends_together: every device may end as late as the last one, not only as long after its own start as the longest
    """
    problem = _Problem(timeline, memory_limit)
    release = [0.0 if ends_together else -float(starts[0]) for starts in timeline.starts]
    # Time runs backwards while pushing right: an action "ends" where it really starts.
    order = sorted(problem.numbers, key=problem.ends.__getitem__)
    _, starts = problem.place(order[::-1], problem.gives, -1, release)
    order = sorted(problem.numbers, key=lambda number: -starts[number])
    rows, _ = problem.place(order, problem.needs, 1, [0.0] * len(release))
    return timeline.schedule.with_rows(map(problem.actions.__getitem__, row) for row in rows)


class _Problem:
    """The costs as plain numbers: floats, since only the order counts here and the simulator has the last word on it.

    An action is a number, chain * M + microbatch; a chain, kind * S + stage, runs in the order of microbatches.
    """

    def __init__(self, timeline: Timeline, memory_limit: Number | None) -> None:
        schedule, costs = timeline.schedule, timeline.costs
        placement = schedule.placement
        assert placement.single is not None
        assert schedule.kinds <= set(_KINDS)
        S, M = placement.num_stages, schedule.num_microbatches
        self.num_microbatches = M
        self.home = placement.single * len(_KINDS)
        durations = costs.durations(placement)
        self.durations = [float(time) for kind in _KINDS for time in durations[kind]]
        held = [float(size) for size in costs.per_stage("activation", placement)]
        kept = [float(size) for size in costs.per_stage("kept_for_weight_grad", placement)]
        self.takes = [*held, *(k - h for k, h in zip(kept, held, strict=True)), *(-k for k in kept)]
        self.limit = float("inf") if memory_limit is None else float(memory_limit) * (1 + 1e-12)
        self.needs: _Needs = [[] for _ in self.home]
        self.gives: _Needs = [[] for _ in self.home]
        for s, hop in enumerate(costs.hops(placement)[1:]):
            self._link(s, s + 1, float(hop))
            self._link(S + s + 1, S + s, float(hop))
        for s in range(S):
            self._link(s, S + s)
            self._link(S + s, 2 * S + s)
        self.ends = [0.0] * (len(self.home) * M)
        self.actions: dict[int, Action] = {}
        base = {kind: i * S for i, kind in enumerate(_KINDS)}
        for action, _, end in timeline.all_spans:
            number = (base[action.kind] + action.stage) * M + action.microbatch
            self.ends[number] = float(end)
            self.actions[number] = action
        # Every action after what it needs.
        self.numbers = [
            chain * M + m for m in range(M) for chain in (*range(S), *reversed(range(S, 2 * S)), *range(2 * S, 3 * S))
        ]

    def _link(self, before: int, after: int, hop: float = 0.0) -> None:
        away = (after - before) * self.num_microbatches
        self.needs[after].append((-away, hop))
        self.gives[before].append((away, hop))

    def place(
        self, order: Sequence[int], needs: _Needs, sign: int, release: Sequence[float]
    ) -> tuple[list[list[int]], list[float]]:
        """Each action in turn as early as it can start: the rows, and when each action ends."""
        M, home, durations = self.num_microbatches, self.home, self.durations
        takes = [sign * size for size in self.takes]
        slack = 1e-9 * max(durations)  # a gap that is too short by rounding alone is long enough
        rows = []
        for device, free in enumerate(release):
            shortest = min(duration for duration, where in zip(durations, home, strict=True) if where == device)
            rows.append(_FillingRow(free, max(shortest - slack, slack), slack, self.limit))
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


class _FillingRow:
    """A device's row while it fills up, in its gaps as well as at its end."""

    __slots__ = ("actions", "free", "gaps", "levels", "limit", "shortest", "slack")

    def __init__(self, free: float, shortest: float, slack: float, limit: float) -> None:
        self.free, self.shortest, self.slack, self.limit = free, shortest, slack, limit
        self.actions: list[int] = []
        self.levels = [0.0]  # what is held before each action, and after the last
        self.gaps: list[tuple[float, float, int]] = []  # from when, to when, and how many actions come before

    def place(self, action: int, ready: float, duration: float, takes: float) -> float:
        """Returns when the action ends."""
        if self.gaps:
            number = self._find_gap(ready, duration, takes)
            if number is not None:
                start = max(ready, self.gaps[number][0])
                self._insert(number, start, start + duration, action, takes)
                return start + duration
        start = self.free
        if ready > start:
            if ready - start > self.shortest:
                self.gaps.append((start, ready, len(self.actions)))
            start = ready
        self.actions.append(action)
        self.levels.append(self.levels[-1] + takes)
        self.free = start + duration
        return self.free

    def _find_gap(self, ready: float, duration: float, takes: float) -> int | None:
        slack, gaps, levels = self.slack, self.gaps, self.levels
        first_index: int | None = None  # before it there is no room in memory, at least not for long enough
        for number in range(bisect_left(gaps, ready + duration - slack, key=_END), len(gaps)):
            begin, end, index = gaps[number]
            start = begin if begin > ready else ready
            # It must start well before the gap ends, or one that takes no time might go ahead of what it needs.
            if start + duration > end + slack or start >= end - slack:
                continue
            if takes <= 0:
                return number
            if first_index is None:
                room = self.limit - takes
                first_index = len(levels)
                while (
                    first_index > index and levels[first_index - 1] <= room
                ):  # from the end, and no further than asked
                    first_index -= 1
            if index >= first_index:
                return number
        return None

    def _insert(self, number: int, start: float, stop: float, action: int, takes: float) -> None:
        begin, end, index = self.gaps[number]
        self.actions.insert(index, action)
        self.levels.insert(index, self.levels[index])
        self.levels[index + 1 :] = [level + takes for level in self.levels[index + 1 :]]
        left = [(begin, start, index)] if start - begin > self.shortest else []
        right = [(stop, end, index + 1)] if end - stop > self.shortest else []
        later = [(begin, end, index + 1) for begin, end, index in self.gaps[number + 1 :]]
        self.gaps[number:] = left + right + later
