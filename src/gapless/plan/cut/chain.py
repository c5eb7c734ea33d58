"""A chain of layers cut into stages, exactly: the slowest stage or hop as quick as possible, then the least squares.

Positions 0..n lie between the layers; stage s holds the layers between two of them. Which are within a bound is a
window that only moves to the right, and the least sum of squares over a window is a question to an envelope of lines:

    (x - u)^2 + value  =  x^2 + (value + u^2 - 2ux)     x: time up to the end, u: time up to the start of the stage

so each stage costs as many steps as there are layers, whatever the windows, and not their square.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from gapless.plan.cut.corridor import Corridor
from gapless.schedule.costs import Number

_ROUNDING = 1e-12  # as a share of the bound: sums of floats vary with their order
_WIDE = 64  # fewer ends than this are not worth being sorted out first


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
    def is_plain(self) -> bool:
        """All stages alike, and nothing but time counts."""
        free = all(hops is None for hops in self.hops) and all(room is None for room in self.rooms)
        return free and all(times is self.times[0] for times in self.times)


class Cuts(NamedTuple):
    """A solution: where each stage ends, its slowest stage or hop, and the sum of the squares of its stages."""

    slowest: Number
    squares: Number
    ends: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(end - start for start, end in pairwise((0, *self.ends)))


def solve(chain: Chain, bounded: bool = True, least: Number = 0) -> Cuts | None:
    """The best cuts, or None where nothing fits the rooms. Not `bounded`: the least squares alone.

    `least`: what the slowest is known not to be below
    """
    high: Number = max(max(times[-1] for times in chain.times), *(max(hops) for hops in chain.hops if hops), 0)
    if not bounded:
        return _least_squares(chain, high)
    if _windows(chain, high) is None:
        return None
    low = least
    if low and _windows(chain, low * (1 + _ROUNDING)) is not None:
        high = low
    while low < (middle := (low + high) / 2) < high and high - low > _ROUNDING * high / 10:
        low, high = (low, middle) if _windows(chain, middle) is not None else (middle, high)
    found = _least_squares(chain, high)
    return found if found is not None else _searched(chain, high)


def _searched(chain: Chain, low: Number) -> Cuts | None:
    """Where uneven stages leave no cuts at the bound that the windows promise: the least one that does."""
    high: Number = max(max(times[-1] for times in chain.times), *(max(hops) for hops in chain.hops if hops), 0)
    best = _least_squares(chain, high)
    if best is None:
        return None
    high = best.slowest
    while low < (middle := (low + high) / 2) < high and high - low > _ROUNDING * high / 10:
        found = _least_squares(chain, middle)
        low, high, best = (middle, high, best) if found is None else (low, middle, found)
    # What was found last may be above its bound by the rounding that bounds allow for; all as slow as it are equals.
    return _least_squares(chain, best.slowest)


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


def _least_squares(chain: Chain, bound: Number) -> Cuts | None:
    """Of all cuts within the bound those with the least sum of squares."""
    limit = bound * (1 + _ROUNDING)
    windows = _windows(chain, limit)
    if windows is None:
        return None
    corridor = Corridor(chain.times[0], chain.num_stages, limit) if chain.is_plain else None
    points: list[int] = [0]  # where the stages so far may end
    values: list[Number] = [0]  # and the least sum of squares then
    came_from: list[dict[int, int]] = []
    for s, (first, last) in enumerate(windows):
        hops = chain.hops[s] if s < chain.num_stages - 1 else None
        ends: Sequence[int] = range(max(first, s + 1), last + 1)
        if hops is not None:
            ends = [j for j in ends if hops[j] <= limit]
        elif corridor is not None and len(ends) > _WIDE:
            ends = corridor.within(ends, s + 1)
        found = _extended(points, values, chain.times[s], chain.rooms[s], ends, limit)
        if not found:
            return None
        points, values = [j for j, _, _ in found], [value for _, value, _ in found]
        came_from.append({j: start for j, _, start in found})
    cuts = [chain.num_layers]
    for starts in reversed(came_from):
        cuts.append(starts[cuts[-1]])
    ends_ = tuple(reversed(cuts[:-1]))
    return Cuts(_slowest(chain, ends_), values[0], ends_)


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
    us = [times[i] for i in points]
    bs = [value + u * u for u, value in zip(us, values, strict=True)]
    ends, lows, highs = _starts(points, us, times, room, ends, limit)
    xs = [times[end] for end in ends]
    found = []
    at = 0
    while at < len(ends):
        # All windows from here on that contain the line `middle`: what is left of it shrinks, what is right grows.
        steady = lows[-1] == lows[at]
        middle = lows[at] if steady else highs[at]
        until = len(ends) if steady else bisect_right(lows, middle, at)
        group = slice(at, until)
        line = slice(middle, highs[until - 1])
        chosen = _envelope(us[line], bs[line], xs[group], [high - middle for high in highs[group]], later_wins=True)
        chosen = [middle + number for number in chosen]
        if not steady:
            line = slice(lows[at], middle)
            mirrored = [-u for u in reversed(us[line])]
            counts = [middle - low for low in reversed(lows[group])]
            left = _envelope(mirrored, bs[line][::-1], [-x for x in reversed(xs[group])], counts, later_wins=False)
            for index, number in enumerate(reversed(left)):
                x, other, number = xs[at + index], chosen[index], middle - 1 - number
                if number < middle and (
                    other < middle or bs[number] - 2 * us[number] * x < bs[other] - 2 * us[other] * x
                ):
                    chosen[index] = number
        found += [
            (end, values[number] + (x - us[number]) ** 2, points[number])
            for end, x, number in zip(ends[group], xs[group], chosen, strict=True)
        ]
        at = until
    return found


def _starts(
    points: Sequence[int],
    us: Sequence[Number],
    times: Sequence[Number],
    room: Room | None,
    ends: Sequence[int],
    limit: Number,
) -> tuple[list[int], list[int], list[int]]:
    """The ends that can be reached, and for each from which point on to before which one the stage may start."""
    reached, lows, highs = [], [], []
    low = high = 0
    count = len(points)
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
            reached.append(end)
            lows.append(low)
            highs.append(high)
    return reached, lows, highs


def _envelope(
    us: Sequence[Number], bs: Sequence[Number], xs: Sequence[Number], counts: Sequence[int], later_wins: bool
) -> list[int]:
    """For each x and count the number of the line with the least b - 2ux among the first `count`; -1 if there is none.

    us, xs and counts never fall from one to the next. Of equal lines the later one wins, or else the earlier one.
    """
    hull: list[int] = []  # the numbers of the lines that are lowest somewhere at or after x
    head = added = 0
    found = []
    for x, count in zip(xs, counts, strict=True):
        while added < count:
            u, b = us[added], bs[added]
            if len(hull) > head and us[hull[-1]] == u:
                if b > bs[hull[-1]] or (b == bs[hull[-1]] and not later_wins):
                    added += 1
                    continue
                hull.pop()
            while len(hull) - head >= 2:
                one, two = hull[-2], hull[-1]
                if (b - bs[one]) * (us[two] - us[one]) > (bs[two] - bs[one]) * (u - us[one]):
                    break
                hull.pop()
            hull.append(added)
            added += 1
        while len(hull) - head >= 2:
            one, two = hull[head], hull[head + 1]
            gain = bs[one] - bs[two] - 2 * (us[one] - us[two]) * x
            if gain < 0 or (gain == 0 and not later_wins):
                break
            head += 1
        found.append(hull[head] if len(hull) > head else -1)
    return found
