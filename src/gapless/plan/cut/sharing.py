"""Stages that share a device share its memory, and a chain alone can't know that: it is searched, exactly.

The best cuts without the shared limits are a bound for all others. Where a device then holds too much, one of its
stages takes at most x of the limit, or it takes more and the others get what is left; both halves are bounded in the
same way, and the most promising one is opened first. The first cuts that fit are the best.

    stages 1 and 6 hold 5 + 5 of 8   ->   stage 1 at most 4   |   stage 1 above 4, so stage 6 at most 4
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gapless.errors import PartitionError
from gapless.plan.cut.chain import Chain, Room, Solution, solve
from gapless.schedule.costs import Number
from gapless.schedule.placement import Placement
from gapless.units import show_count

_ROUNDING = 1e-12

Range = tuple[Number, Number]  # what a stage may hold: at least, at most


def solve_shared(
    chain: Chain,
    memory: Sequence[Sequence[Number]],
    placement: Placement,
    limits: Sequence[Number],
    most_tries: int,
) -> Solution | None:
    """The best cuts such that no device holds more than its limit. `memory`: per stage, summed up to each position."""
    homes = placement.homes
    start: tuple[Range, ...] = tuple((0, limits[home]) for home in homes)
    waiting: list[tuple[float, Number, int, Solution, tuple[Range, ...]]] = []
    tries = 0

    def add(ranges: tuple[Range, ...], least: Number = 0) -> None:
        nonlocal tries
        tries += 1
        if tries > most_tries:
            raise PartitionError(
                f"no partition into {show_count(len(homes), 'stage')} was found that fits the devices' memory, after "
                f"{most_tries} tries: raise the limit, use remat, or place one stage on each device"
            )
        rooms = [Room(sums, *held) for sums, held in zip(memory, ranges, strict=True)]
        cuts = solve(replace(chain, rooms=rooms), least=least)
        if cuts is not None:
            heapq.heappush(waiting, (float(f"{float(cuts.slowest):.11g}"), cuts.squares, tries, cuts, ranges))

    add(start)
    while waiting:
        *_, cuts, ranges = heapq.heappop(waiting)
        held = held_by_stage(memory, cuts)
        pairs = zip(placement.stages, limits, strict=True)
        full = [stages for stages, limit in pairs if sum(held[s] for s in stages) > limit * (1 + _ROUNDING)]
        if not full:
            return cuts
        for half in _halves(ranges, full[0], held, limits[homes[full[0][0]]]):
            add(half, cuts.slowest)
    return None


def held_by_stage(memory: Sequence[Sequence[Number]], cuts: Solution) -> list[Number]:
    """What each stage holds with these cuts."""
    starts = (0, *cuts.ends[:-1])
    return [sums[end] - sums[start] for sums, start, end in zip(memory, starts, cuts.ends, strict=True)]


def _halves(
    ranges: tuple[Range, ...], stages: Sequence[int], held: Sequence[Number], limit: Number
) -> Iterator[tuple[Range, ...]]:
    """The stage whose range can still be cut in two by its share of the limit; what can't be is left out."""
    total = sum(held[s] for s in stages)
    shares = {s: held[s] * limit / total for s in stages}
    stage = max((s for s in stages if ranges[s][0] < shares[s] < held[s]), key=lambda s: held[s])
    share = shares[stage]
    for low, high in ((ranges[stage][0], share), (share, ranges[stage][1])):
        half = list(ranges)
        half[stage] = (low, high)
        least = sum(half[s][0] for s in stages)
        if least <= limit:
            for s in stages:
                half[s] = (half[s][0], min(half[s][1], limit - (least - half[s][0])))
            if all(low <= high for low, high in half):
                yield tuple(half)
