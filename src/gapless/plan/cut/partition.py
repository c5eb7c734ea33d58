"""Which layers make which stage: exact, by the slowest stage or hop, then by how evenly the rest is spread.

A device never waits for what it sends, so a hop is no part of a stage's time: it is a stage of its own, on the link,
and only the slowest of all counts. Times are those of one microbatch.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise

from gapless.errors import PartitionError, TooFewLayersError
from gapless.plan.cut.chain import Chain, solve
from gapless.plan.cut.sharing import held_by_stage, solve_shared
from gapless.schedule.costs import Number
from gapless.schedule.placement import Placement, line
from gapless.units import show_count

PerLayer = Sequence[Number] | Sequence[Sequence[Number]]


def balanced(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Layers per stage such that the costliest stage is as cheap as possible, and the sum of squares is then the least.

    >>> balanced([1] * 16, 4)
    (4, 4, 4, 4)
    """
    return partition(costs, line(num_stages))


def partition(
    times: PerLayer,
    placement: Placement,
    *,
    speeds: Sequence[Number] | None = None,
    hops: PerLayer | None = None,
    memory: PerLayer | None = None,
    limits: Number | Sequence[Number] | None = None,
    most_tries: int = 2000,
) -> tuple[int, ...]:
    """Layers per stage: the slowest stage or hop is as quick as possible, and the sum of the squares of the stages'
    times is then the least. A list has one number per layer, or one such list per stage.

    speeds  of the devices: a layer takes its time divided by the speed of its device
    hops    the time that what a layer returns is on its way to the next device
    memory  what a layer holds on its device, and `limits` what the devices have, or each of them; stages that share a
            device share its memory, and more than `most_tries` tries to share it well are given up
    """
    S = placement.num_stages
    rows = _rows(times, S)
    check_enough_layers(len(rows[0]), S)
    each = [1] * S if speeds is None else [speeds[home] for home in placement.homes]
    chain = Chain(_sums(rows, each), _crossings(hops, placement), [None] * S)
    if memory is None or limits is None:
        cuts = solve(chain)
        assert cuts is not None
        return cuts.counts
    held = _sums(_rows(memory, S), [1] * S)
    limits = [limits] * placement.num_devices if isinstance(limits, Number) else list(limits)
    cuts = solve_shared(chain, held, placement, limits, most_tries)
    if cuts is None:
        raise PartitionError(_why_nothing_fits(held, placement, limits))
    return cuts.counts


def gpipe(costs: Sequence[Number], num_stages: int) -> tuple[int, ...]:
    """GPipe's own: a layer goes to stage min(floor(qS), S-1), q its inclusive share of all. Stages may stay empty.

    >>> gpipe([1] * 16, 4)
    (3, 4, 4, 5)
    """
    check_enough_layers(len(costs), num_stages)
    total = sum(costs)
    counts = [0] * num_stages
    for before in accumulate(costs):
        counts[min(int(before * num_stages / total), num_stages - 1) if total else num_stages - 1] += 1
    return tuple(counts)


def equal_counts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """By counting layers: the first stages get what does not divide."""
    check_enough_layers(num_layers, num_stages)
    each, more = divmod(num_layers, num_stages)
    return tuple(each + (stage < more) for stage in range(num_stages))


def every_cut(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut so many layers."""
    for cuts in combinations(range(1, layers), stages - 1):
        yield tuple(end - start for start, end in pairwise((0, *cuts, layers)))


def held_together(memory: Sequence[Sequence[float]], counts: Sequence[int]) -> float:
    """What all stages hold with these cuts; `memory`: of each layer, were it in each stage."""
    ends = [0, *accumulate(counts)]
    return sum(sum(own[start:end]) for own, (start, end) in zip(memory, pairwise(ends), strict=True))


def check_enough_layers(num_layers: int, num_stages: int) -> None:
    """Raises where a stage would have no layer."""
    if num_layers < num_stages:
        raise TooFewLayersError(
            f"the model has {show_count(num_layers, 'layer')}, but {num_stages} stages were asked for: use fewer "
            "devices or stages per device, or cut the model into smaller layers",
            num_layers,
        )


def _rows(values: PerLayer, num_stages: int) -> list[Sequence[Number]]:
    if values and isinstance(values[0], Sequence):
        return list(values)  # type: ignore[arg-type]
    return [values] * num_stages  # type: ignore[list-item]


def _sums(rows: Sequence[Sequence[Number]], speeds: Sequence[Number]) -> list[Sequence[Number]]:
    """Each row, at the speed of its device, summed up to every position; rows that are the same object stay so."""
    pairs = list(zip(rows, speeds, strict=True))
    taken = {(id(row), speed): row if speed == 1 else [time / speed for time in row] for row, speed in pairs}
    made = {key: [0, *accumulate(row)] for key, row in taken.items()}
    return [made[id(row), speed] for row, speed in pairs]


def _crossings(hops: PerLayer | None, placement: Placement) -> list[Sequence[Number] | None]:
    """The hop behind each stage by where it ends; none between two stages of one device."""
    if hops is None:
        return [None] * placement.num_stages
    rows = enumerate(_rows(hops, placement.num_stages), start=1)
    return [[0, *row] if after in placement.crossed else None for after, row in rows]


def _why_nothing_fits(held: Sequence[Sequence[Number]], placement: Placement, limits: Sequence[Number]) -> str:
    """The layer that is too large, or what the fullest device holds when memory alone decides."""
    S, n = placement.num_stages, len(held[0]) - 1
    most = float(max(limits))
    sizes = [min(sums[layer + 1] - sums[layer] for sums in held) for layer in range(n)]
    largest = max(range(n), key=sizes.__getitem__)
    if sizes[largest] > most:
        return (
            f"layer {largest} alone holds {float(sizes[largest]):g}, but the largest limit of a device is {most:g}: "
            "cut it into smaller layers, or use smaller microbatches"
        )
    pairs = zip(held, placement.homes, strict=True)
    shares = [[size / max(limits[home], 1e-9) for size in sums] for sums, home in pairs]
    even = solve(Chain(shares, [None] * S, [None] * S))
    assert even is not None
    by_stage = held_by_stage(held, even)
    needs = [sum(by_stage[s] for s in stages) for stages in placement.stages]
    device = max(range(len(needs)), key=lambda d: needs[d] - limits[d])
    return (
        f"no partition of {show_count(n, 'layer')} into {S} stages fits the limits: spread by memory alone, device "
        f"{device} still holds {float(needs[device]):g} of its {float(limits[device]):g}"
    )
