"""The partition is exact: held against every partition there is, and against what others do."""

import random
import time
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest

from gapless.errors import PartitionError
from gapless.plan.cut.partition import balanced, equal_counts, gpipe, partition
from gapless.schedule.placement import Placement, line, loop, vee

COSTS = (0, 1, 1, 1, 2, 2, 3, 5, 8, 13)


def all_partitions(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(end - start for start, end in pairwise((0, *cuts, num_layers)))


def stages_of(values: Sequence[float], counts: Sequence[int]) -> list[float]:
    found, at = [], 0
    for count in counts:
        found.append(sum(values[at : at + count]))
        at += count
    return found


class Case:
    """Random layers, devices and limits; small enough that every partition can be tried."""

    def __init__(self, chance: random.Random, placement: Placement, uneven: bool, hops: bool, limited: bool) -> None:
        n = placement.num_stages + chance.randint(0, 7 - placement.num_stages // 2)
        self.placement = placement
        self.costs = chance.choices(COSTS, k=n)
        self.speeds = chance.choices((1, 2, 4), k=placement.num_devices) if uneven else None
        self.hops = chance.choices((0, 1, 2, 4, 9), k=n) if hops else None
        self.memory = [chance.choices((1, 2, 3, 7), k=n) for _ in range(placement.num_stages)] if limited else None
        fair = sum(map(sum, self.memory)) // placement.num_stages // placement.num_devices if self.memory else 0
        self.limits = [fair + chance.randint(0, 10) for _ in range(placement.num_devices)] if limited else None

    def value(self, counts: Sequence[int]) -> tuple[float, float]:
        """The slowest stage or hop, and the sum of squares."""
        homes = [self.placement.device(stage, 0) for stage in range(len(counts))]
        speeds = self.speeds or [1] * self.placement.num_devices
        times = [cost / speeds[home] for cost, home in zip(stages_of(self.costs, counts), homes, strict=True)]
        slowest = max(times)
        if self.hops is not None:
            ends = [sum(counts[: stage + 1]) for stage in range(len(counts) - 1)]
            crossing = [self.hops[end - 1] for stage, end in enumerate(ends) if homes[stage] != homes[stage + 1]]
            slowest = max([slowest, *crossing])
        return slowest, sum(time * time for time in times)

    def fits(self, counts: Sequence[int]) -> bool:
        if self.memory is None or self.limits is None:
            return True
        held = [0.0] * self.placement.num_devices
        for stage in range(len(counts)):
            held[self.placement.device(stage, 0)] += stages_of(self.memory[stage], counts)[stage]
        return all(holds <= limit for holds, limit in zip(held, self.limits, strict=True))

    def best(self) -> tuple[float, float] | None:
        n, S = len(self.costs), self.placement.num_stages
        return min((self.value(counts) for counts in all_partitions(n, S) if self.fits(counts)), default=None)

    def found(self) -> tuple[int, ...]:
        return partition(
            self.costs,
            self.placement,
            speeds=self.speeds,
            hops=self.hops,
            memory=self.memory,
            limits=self.limits,
        )


PLACEMENTS = (line(1), line(2), line(3), line(4), loop(2, 2), loop(3, 2), loop(2, 3), vee(2), vee(3))


@pytest.mark.in_pairs
@pytest.mark.parametrize("limited", [False, True], ids=["", "limited"])
@pytest.mark.parametrize("hops", [False, True], ids=["", "hops"])
@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("cases", [260, pytest.param(5000, marks=pytest.mark.slow)])
def test_it_is_the_best_of_all_there_are(cases: int, uneven: bool, hops: bool, limited: bool) -> None:
    chance = random.Random(f"{cases} {uneven} {hops} {limited}")
    impossible = 0
    for number in range(cases):
        case = Case(chance, PLACEMENTS[number % len(PLACEMENTS)], uneven, hops, limited)
        best = case.best()
        if best is None:
            impossible += 1
            with pytest.raises(PartitionError, match=r"^(no partition of|layer \d+ alone)"):
                case.found()
            continue
        counts = case.found()
        assert min(counts) >= 1
        assert sum(counts) == len(case.costs)
        assert case.fits(counts)
        assert case.value(counts) == best, (vars(case), counts)
    assert limited == (impossible > 0)
    assert impossible < cases / 2


def test_equals_at_the_bound_are_all_compared() -> None:
    # Rounding once left the bound a hair too low, where one of two partitions with the same slowest stage was cut off.
    costs = [0, 1, 13, 5, 5, 1, 8, 3]
    assert partition(costs, loop(2, 2), speeds=[1, 4]) == (2, 1, 1, 4)


def test_it_never_loses_to_gpipe_or_to_counting_layers() -> None:
    chance = random.Random(7)
    for _ in range(150):
        n = chance.randint(1, 60)
        S = chance.randint(1, min(n, 12))
        costs = [chance.choice((chance.random(), 10 * chance.random(), 0.0)) for _ in range(n)]
        ours = max(stages_of(costs, balanced(costs, S)))
        for other in (gpipe(costs, S), equal_counts(n, S)):
            assert ours <= max(stages_of(costs, other)) * (1 + 1e-9)


@pytest.mark.parametrize("kind", ["even", "random", "one heavy layer", "many heavy layers", "growing", "nothing"])
def test_wide_windows_and_narrow_ones_give_the_least_squares(kind: str) -> None:
    chance = random.Random(kind)
    n, S = 300, 9
    layers = {
        "even": [1] * n,
        "random": [chance.randint(1, 100) for _ in range(n)],
        "one heavy layer": [1] * 200 + [500] + [chance.randint(0, 3) for _ in range(99)],
        "many heavy layers": [200 if number in (3, 4, 70, 150, 151, 299) else 1 for number in range(n)],
        "growing": [number * number for number in range(n)],
        "nothing": [0] * n,
    }[kind]
    counts = balanced(layers, S)
    assert sum(counts) == n
    assert (max(stages_of(layers, counts)), sum(x * x for x in stages_of(layers, counts))) == slow_best(layers, S)


def slow_best(costs: Sequence[int], num_stages: int) -> tuple[int, int]:
    """The two figures by plain dynamic programming over every cut."""
    sums = [sum(costs[:end]) for end in range(len(costs) + 1)]
    ends = range(len(costs) + 1)
    slowest = [float(sums[end]) if end else 0 for end in ends]
    for stage in range(1, num_stages):
        slowest = [
            min((max(slowest[start], sums[end] - sums[start]) for start in range(stage, end)), default=float("inf"))
            for end in ends
        ]
    squares = [float(sums[end] ** 2) if end and sums[end] <= slowest[-1] else float("inf") for end in ends]
    for stage in range(1, num_stages):
        squares = [
            min(
                (
                    squares[start] + (sums[end] - sums[start]) ** 2
                    for start in range(stage, end)
                    if sums[end] - sums[start] <= slowest[-1]
                ),
                default=float("inf"),
            )
            for end in ends
        ]
    return int(slowest[-1]), int(squares[-1])


def test_sixteen_equal_layers_on_four_devices() -> None:
    assert gpipe([1] * 16, 4) == (3, 4, 4, 5)
    assert balanced([1] * 16, 4) == equal_counts(16, 4) == (4, 4, 4, 4)


def test_a_slow_device_gets_fewer_layers() -> None:
    assert partition([1] * 10, line(3), speeds=[2, 1, 2]) == (4, 2, 4)


def test_a_wide_boundary_is_not_cut() -> None:
    costs, hops = [1, 1, 1, 1], [0, 9, 0, 0]
    assert partition(costs, line(2), hops=hops) == (3, 1)
    # Where both stages are on one device nothing crosses.
    assert partition(costs, Placement(1, ((0,), (0,))), hops=hops) == (2, 2)


def test_stages_of_one_device_share_its_memory() -> None:
    memory = [4, 1, 1, 1, 1, 4]
    assert partition([1] * 6, vee(2)) == (2, 2, 1, 1)
    assert partition([1] * 6, vee(2), memory=memory, limits=8) == (1, 2, 2, 1)


def test_thousands_of_layers_into_64_stages_take_less_than_two_seconds() -> None:
    chance = random.Random(0)
    # One heavy layer leaves the bound on a stage so wide that every cut within it has to be compared.
    for costs in ([chance.random() for _ in range(10_000)], [1.0] * 1_999 + [1_000.0]):
        began = time.process_time()
        counts = balanced(costs, 64)
        assert time.process_time() - began < 2  # of this process, however busy the machine is
        assert (len(counts), sum(counts)) == (64, len(costs))


@pytest.mark.parametrize(
    ("memory", "limits", "message"),
    [
        ([1, 9, 1, 1], 8, "layer 1 alone holds 9, but the largest limit of a device is 8: cut it into smaller layers"),
        ([3, 3, 3, 3], 5, "no partition of 4 layers into 2 stages fits the limits: spread by memory alone, device 0 "),
        ([3, 3, 3, 3], [9, 2], "spread by memory alone, device 1 still holds 3 of its 2"),
    ],
)
def test_what_can_t_fit_is_said_with_its_numbers(memory: list[int], limits: int | list[int], message: str) -> None:
    with pytest.raises(PartitionError) as caught:
        partition([1] * 4, line(2), memory=memory, limits=limits)
    assert message in str(caught.value)


def test_more_stages_than_layers_are_refused() -> None:
    for function in (balanced, gpipe):
        with pytest.raises(PartitionError, match="the model has 3 layers, but 4 stages were asked for"):
            function([1, 1, 1], 4)
