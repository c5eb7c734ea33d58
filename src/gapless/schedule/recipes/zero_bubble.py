"""Recipes with one stage per device and a split backward: zb-h1, zb-h2.

The input gradient I is on the way of the other devices, the weight gradient W is on nobody's: it fills what would be
bubbles. Letters: K devices, M microbatches, r = device 0..K-1.
"""

from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.placement import line
from gapless.schedule.recipes.head_start import one_ahead_of_each

_F, _I, _W = Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD


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
        forwards, inputs, weights = ([Action(r, kind, m) for m in range(M)] for kind in (_F, _I, _W))
        first = min(k * r, M)  # the I that is followed by the first W
        groups = [[i] for i in inputs[:first]] + [[i, w] for i, w in zip(inputs[first:], weights, strict=False)]
        rows.append(one_ahead_of_each(forwards, k * (K - 1 - r), [*groups, weights[M - first :]]))
    return Schedule(tuple(rows), line(K), name)
