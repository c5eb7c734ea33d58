"""Recipes with v stages per device, stage s on device s mod K: interleaved, looped-bfs.

Letters: K devices, M microbatches, v stages per device, r = device 0..K-1.
"""

from itertools import accumulate

from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.placement import loop
from gapless.schedule.recipes.head_start import one_ahead_of_each


def interleaved(num_devices: int, num_microbatches: int, stages_per_device: int = 2) -> Schedule:
    """Megatron's interleaved 1F1B: the bubble shrinks v times, the traffic grows v times.

    Microbatches go in max(1, M // K) groups whose sizes differ by at most one, the larger first (a short last group
    would deadlock). Inside a group all its microbatches run the first local stage, then the second, and so on;
    backwards use the same table with the local stages reversed. A device runs w = min(2(K-1-r) + (v-1)N, M*v) F
    ahead, N the size of the first group.

    0: 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
    1: 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """
    K, M, v = num_devices, num_microbatches, stages_per_device
    count = max(1, M // K)
    sizes = [M // count + (1 if i < M % count else 0) for i in range(count)]
    groups = [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    forwards = [(local, m) for group in groups for local in range(v) for m in group]  # per virtual step
    backwards = [(v - 1 - local, m) for local, m in forwards]
    rows = []
    for r in range(K):
        ahead = [_action(K, r, Kind.FORWARD, step) for step in forwards]
        behind = [[_action(K, r, Kind.BACKWARD, step)] for step in backwards]
        rows.append(one_ahead_of_each(ahead, 2 * (K - 1 - r) + (v - 1) * sizes[0], behind))
    return Schedule(tuple(rows), loop(K, v), "interleaved")


def looped_bfs(num_devices: int, num_microbatches: int, stages_per_device: int = 2) -> Schedule:
    """Local stages ascending, all M F each; then local stages descending, all M B each (breadth first).

    0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1: 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """
    K, M, v = num_devices, num_microbatches, stages_per_device
    rows = []
    for r in range(K):
        forwards = [_action(K, r, Kind.FORWARD, (local, m)) for local in range(v) for m in range(M)]
        backwards = [_action(K, r, Kind.BACKWARD, (local, m)) for local in reversed(range(v)) for m in range(M)]
        rows.append((*forwards, *backwards))
    return Schedule(tuple(rows), loop(K, v), "looped-bfs")


def _action(num_devices: int, device: int, kind: Kind, step: tuple[int, int]) -> Action:
    local, microbatch = step
    return Action(local * num_devices + device, kind, microbatch)
