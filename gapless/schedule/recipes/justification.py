"""Push a schedule against its end, then back against its start: what was idle on the way is gone.

List scheduling is tight where it begins and loose where it ends: a W started in a short gap holds up the chain of I of the last
microbatches, and when the last I arrives there are no W left to fill the wait. Double justification, known from project
scheduling, mends that. Take the actions by falling end and put each as *late* as its device, its successors and the memory
allow; then take them by rising start and put each as *early* as possible:

    seed                0: F F F I W I W . . I W        the last I arrives late, nothing is left to fill the wait
    pushed to the end   0: . F F F I . I W W I W        a W moved into the wait, the rest moves up behind it
    pushed back         0: F F F I I W W I W            and the idle time has gathered at the end

An action may fill any gap that is long enough, so nothing is ever held up by what comes after it in the list: by a W above all.
As that list is the order of a schedule that fits, each action still fits behind those before it, and so the result always fits too.
"""

from collections.abc import Sequence

from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.costs import Costs, Number
from gapless.schedule.timeline import Timeline

_KINDS = (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
_Need = tuple[int, float]  # how far ahead the number of the needed action is, and the hop between the two


class Justification:
    """Everything about the costs that the passes ask for, as plain numbers.

    An action is a number: (kind * S + stage) * M + microbatch, and kind * S + stage is its chain: those run in microbatch order.
    Times and bytes are floats here, whatever the costs are: only the order counts, and the simulator has the last word on it.
    """

    def __init__(self, num_microbatches: int, schedule: Schedule, costs: Costs, memory_limit: Number | None) -> None:
        placement = schedule.placement
        assert placement.single is not None
        S, M = placement.num_stages, num_microbatches
        self.placement, self.M, self.home = placement, M, placement.single * 3
        durations = costs.durations(placement)
        self.durations = [float(time) for kind in _KINDS for time in durations[kind]]
        held = [float(size) for size in costs.per_stage("activation", placement)]
        kept = [min(float(k), h) for k, h in zip(costs.per_stage("kept_for_weight_grad", placement), held, strict=True)]
        self.takes = [*held, *(k - h for k, h in zip(kept, held, strict=True)), *(-k for k in kept)]
        self.limit = float("inf") if memory_limit is None else float(memory_limit) * (1 + 1e-9)
        hop = [float(costs.latency) if a != b else 0.0 for a, b in zip(self.home, self.home[1:S], strict=False)]
        F, I, W = range(S), range(S, 2 * S), range(2 * S, 3 * S)  # noqa: E741
        self.needs: list[list[_Need]] = [[] for _ in range(3 * S)]
        self.gives: list[list[_Need]] = [[] for _ in range(3 * S)]
        for s in range(S):
            self._link(F[s], I[s], 0.0)
            self._link(I[s], W[s], 0.0)
            if s + 1 < S:
                self._link(F[s], F[s + 1], hop[s])
                self._link(I[s + 1], I[s], hop[s])

    def _link(self, before: int, after: int, hop: float) -> None:
        self.needs[after].append(((before - after) * self.M, hop))
        self.gives[before].append(((after - before) * self.M, hop))

    def justified(self, timeline: Timeline, device_ends: Sequence[Number]) -> Schedule:
        return timeline.schedule
