"""A chain of layers cut into stages, exactly: the slowest stage or hop as quick as possible, then the least squares.

Positions 0..n lie between the layers; stage s holds the layers between two of them. From where a stage that ends at a
position may start is a window that only moves to the right, and so does the best start within it, since squares are
convex. So the best start of the middle end cuts the starts of all other ends in two:

    ends     1  2  3 [4] 5  6  7
    starts   <-- a to s --> <-- s to b -->      s: the best start for end 4

and one more stage costs n log n steps for n layers, however wide the windows are.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from gapless.schedule.costs import Number

_ROUNDING = 1e-12  # as a share of the bound: sums of floats vary with their order


class Room(NamedTuple):
    """What a stage holds, summed up to each position, and between what two it must be."""

    sums: Sequence[Number]
    least: Number
    most: Number


@dataclass(frozen=True)
class Chain:
    """Per stage; stages that are alike may share their lists.

    times  what the layers before each position cost together
    hops   the time of the hop if the stage ends at a position; None where it is free
    rooms  None where memory does not matter
    """

    times: Sequence[Sequence[Number]]
    hops: Sequence[Sequence[Number] | None]
    rooms: Sequence[Room | None]

    @property
    def num_stages(self) -> int:
        return len(self.times)

    @property
    def num_layers(self) -> int:
        return len(self.times[0]) - 1

    @property
    def most(self) -> Number:
        """What no stage and no hop is above."""
        return max(max(times[-1] for times in self.times), *(max(hops) for hops in self.hops if hops), 0)


class Solution(NamedTuple):
    """Where each stage ends, its slowest stage or hop, and the sum of the squares of its stages."""

    slowest: Number
    squares: Number
    ends: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(end - start for start, end in pairwise((0, *self.ends)))


def solve(chain: Chain, least: Number = 0) -> Solution | None:
    """The best solution, or None where nothing fits the rooms. `least`: what the slowest is known not to be below."""
    low, high = least, chain.most
    if _windows(chain, high) is None:
        return None
    if low and _windows(chain, low * (1 + _ROUNDING)) is not None:
        high = low
    high = _bisected(low, high, lambda bound: _windows(chain, bound) is not None)
    found = _least_squares(chain, high)
    return found if found is not None else _searched(chain, high)


def _searched(chain: Chain, low: Number) -> Solution | None:
    """Where uneven stages leave no cuts at the bound that the windows promise: the least one that does."""
    best = _least_squares(chain, chain.most)
    if best is not None:
        best = _least_squares(
            chain, _bisected(low, best.slowest, lambda bound: _least_squares(chain, bound) is not None)
        )
    # What was found last may be above its bound by the rounding that bounds allow for; all as slow as it are equals.
    return None if best is None else _least_squares(chain, best.slowest)


def _bisected(low: Number, high: Number, fits: Callable[[Number], bool]) -> Number:
    """The least bound of those between that fits; `high` does."""
    while low < (middle := (low + high) / 2) < high and high - low > _ROUNDING * high / 10:
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _windows(chain: Chain, bound: Number) -> list[tuple[int, int]] | None:
    """Per stage from where to where it may end, by going as far as possible from either side; None if they miss."""
    S, n = chain.num_stages, chain.num_layers
    last, at = [], 0
    for s, (times, hops, room) in enumerate(zip(chain.times, chain.hops, chain.rooms, strict=True)):
        end = min(n - (S - 1 - s), bisect_right(times, times[at] + bound, at) - 1)
        if room is not None:
            end = min(end, bisect_right(room.sums, room.sums[at] + room.most, at) - 1)
        while hops is not None and s < S - 1 and end > at and hops[end] > bound:
            end -= 1
        at = max(at, end)
        last.append(at)
    if at < n:
        return None
    first, at = [n], n
    for s in range(S - 1, -1, -1):
        room, hops = chain.rooms[s], chain.hops[s - 1]
        start = max(s, bisect_left(chain.times[s], chain.times[s][at] - bound, 0, at))
        if room is not None:
            start = max(start, bisect_left(room.sums, room.sums[at] - room.most, 0, at))
        while s > 0 and hops is not None and start < at and hops[start] > bound:
            start += 1
        at = min(at, start)
        first.append(at)
    if first.pop() > 0:
        return None
    windows = list(zip(reversed(first), last, strict=True))
    return windows if all(low <= high for low, high in windows) else None


def _least_squares(chain: Chain, bound: Number) -> Solution | None:
    """Of all cuts within the bound those with the least sum of squares."""
    limit = bound * (1 + _ROUNDING)
    windows = _windows(chain, limit)
    if windows is None:
        return None
    points: list[int] = [0]  # where the stages so far may end
    values: list[Number] = [0]  # and the least sum of squares then
    came_from: list[dict[int, int]] = []
    for s, (first, last) in enumerate(windows):
        hops = chain.hops[s] if s < chain.num_stages - 1 else None
        ends: Sequence[int] = range(max(first, s + 1), last + 1)
        if hops is not None:
            ends = [j for j in ends if hops[j] <= limit]
        found = _extended(points, values, chain.times[s], chain.rooms[s], ends, limit)
        if not found:
            return None
        points, values = [j for j, _, _ in found], [value for _, value, _ in found]
        came_from.append({j: start for j, _, start in found})
    cuts = [chain.num_layers]
    for starts in reversed(came_from):
        cuts.append(starts[cuts[-1]])
    ends_ = tuple(reversed(cuts[:-1]))
    return Solution(_slowest(chain, ends_), values[0], ends_)


def _slowest(chain: Chain, ends: Sequence[int]) -> Number:
    stages = max(times[j] - times[i] for times, (i, j) in zip(chain.times, pairwise((0, *ends)), strict=True))
    hops = (hops[j] for hops, j in zip(chain.hops[:-1], ends, strict=False) if hops is not None)
    return max(stages, *hops, 0)


def _extended(
    points: Sequence[int],
    values: Sequence[Number],
    times: Sequence[Number],
    room: Room | None,
    ends: Sequence[int],
    limit: Number,
) -> list[tuple[int, Number, int]]:
    """One more stage: (end, least sum of squares, where the stage starts) for each end that can be reached."""
    us, count = [times[i] for i in points], len(points)
    reached = []  # the ends, and for each from which point on to before which one the stage may start
    low = high = 0
    for end in ends:
        least = times[end] - limit
        while low < count and us[low] < least:
            low += 1
        while high < count and points[high] < end:
            if room is not None and room.sums[end] - room.sums[points[high]] < room.least:
                break
            high += 1
        while room is not None and low < count and room.sums[end] - room.sums[points[low]] > room.most:
            low += 1
        if low < high:
            reached.append((end, low, high))
    found: list[tuple[int, Number, int]] = [(0, 0, 0)] * len(reached)
    waiting = [(0, len(reached), 0, count)]  # ends, and between which points their stages start
    while waiting:
        first, last, low, high = waiting.pop()
        if first == last:
            continue
        middle = (first + last) // 2
        end, lowest, highest = reached[middle]
        x, here = times[end], slice(max(low, lowest), min(high, highest))
        squares = [value + (x - u) * (x - u) for value, u in zip(values[here], us[here], strict=True)]
        least = min(squares)
        best = here.stop - 1 - squares[::-1].index(least)  # the last of equals
        found[middle] = (end, least, points[best])
        waiting += [(first, middle, low, best + 1), (middle + 1, last, best, high)]
    return found
