"""Recipes with one stage per device, and a whole backward: naive, gpipe, 1f1b, eager-1f1b.

Letters: K devices, M microbatches, r = device 0..K-1, w = how many F a device runs before its first B.
"""

from collections.abc import Callable

from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.placement import line
from gapless.schedule.recipes.head_start import one_ahead_of_each


def naive(num_devices: int, num_microbatches: int) -> Schedule:
    """Each microbatch runs through all devices and back before the next starts.

    0: 0F0 0B0 0F1 0B1
    1: 1F0 1B0 1F1 1B1
    """
    return _one_forward_one_backward("naive", num_devices, num_microbatches, warm_up=lambda r: 0)


def gpipe(num_devices: int, num_microbatches: int) -> Schedule:
    """Every F, then every B. The B run in microbatch order, so that gradients add up as in every other schedule.

    0: 0F0 0F1 0F2 0B0 0B1 0B2
    1: 1F0 1F1 1F2 1B0 1B1 1B2
    """
    return _one_forward_one_backward("gpipe", num_devices, num_microbatches, warm_up=lambda r: num_microbatches)


def one_forward_one_backward(num_devices: int, num_microbatches: int) -> Schedule:
    """w = K-1-r: a device runs ahead just as far as the pipeline below it is long (PipeDream-Flush).

    0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
    2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
    """
    return _one_forward_one_backward("1f1b", num_devices, num_microbatches, lambda r: num_devices - 1 - r)


def eager_one_forward_one_backward(num_devices: int, num_microbatches: int) -> Schedule:
    """w = 2(K-1-r): twice the head start, which hides the latency of the hops.

    0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    1: 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
    """
    return _one_forward_one_backward("eager-1f1b", num_devices, num_microbatches, lambda r: 2 * (num_devices - 1 - r))


def _one_forward_one_backward(name: str, K: int, M: int, warm_up: Callable[[int], int]) -> Schedule:
    rows = []
    for r in range(K):
        forwards = [Action(r, Kind.FORWARD, m) for m in range(M)]
        rows.append(one_ahead_of_each(forwards, warm_up(r), [[Action(r, Kind.BACKWARD, m)] for m in range(M)]))
    return Schedule(tuple(rows), line(K), name)
