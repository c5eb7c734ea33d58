"""Recipes with one stage per device and a split backward: zb-h1, zb-h2.

The input gradient I is on the way of the other devices, the weight gradient W is on nobody's: it fills what would be
bubbles. Letters: K devices, M microbatches, r = device 0..K-1.
"""

from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.placement import line


def zb_h1(num_devices: int, num_microbatches: int) -> Schedule:
    """1f1b's memory, a third of its bubble: device r holds r weight gradients back and fills its last gap with them.

    0: 0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
    1: 1F0 1F1 1I0 1F2 1I1 1W0 1I2 1W1 1W2
    2: 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2W1 2W2
    """
    return _zero_bubble("zb-h1", num_devices, num_microbatches, 1)


def zb_h2(num_devices: int, num_microbatches: int) -> Schedule:
    """Twice the head start: no span bubble, for 2K-1 activations; pays off where the optimizer step does not wait
    for all.

    0: 0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
    1: 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
    """
    return _zero_bubble("zb-h2", num_devices, num_microbatches, 2)


def _zero_bubble(name: str, K: int, M: int, k: int) -> Schedule:
    rows = []
    for r in range(K):
        w = min(k * (K - 1 - r), M)
        row = [Action(r, Kind.FORWARD, m) for m in range(w)]
        done = 0
        for i in range(M):
            if i + w < M:
                row.append(Action(r, Kind.FORWARD, i + w))
            row.append(Action(r, Kind.INPUT_GRAD, i))
            if i >= k * r:
                row.append(Action(r, Kind.WEIGHT_GRAD, done))
                done += 1
        row += [Action(r, Kind.WEIGHT_GRAD, m) for m in range(done, M)]
        rows.append(tuple(row))
    return Schedule(tuple(rows), line(K), name)
