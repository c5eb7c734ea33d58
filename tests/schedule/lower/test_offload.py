"""Which activations leave for the host: those that wait longest, no more than must, none that would be waited for."""

import dataclasses
import random
from fractions import Fraction
from itertools import pairwise

import pytest

import gapless
from gapless.schedule.action import COPIES, Kind
from gapless.schedule.lower import add_offload, add_recompute, fuse
from gapless.schedule.lower.offload import ended_copies

NAMES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved")


def drawn(seed: int) -> tuple[random.Random, gapless.Schedule, gapless.Costs]:
    rng = random.Random(seed)
    devices = rng.randint(2, 4)
    schedule = gapless.make_schedule(rng.choice(NAMES), devices=devices, microbatches=devices * rng.randint(1, 4))
    costs = gapless.Costs(
        forward=rng.randint(1, 4),
        input_grad=rng.randint(1, 4),
        weight_grad=rng.randint(1, 4),
        recompute=rng.randint(1, 4),
        activation=Fraction(rng.randint(1, 6)),
        boundary=Fraction(1, 2),
        host_bandwidth=Fraction(rng.randint(1, 12), 4),
        host_latency=Fraction(rng.randint(0, 2), 8),
        host_share=rng.choice([1, 2]),
    )
    schedule = fuse(schedule, costs) if rng.random() < 0.5 else schedule
    return rng, add_recompute(schedule, costs) if rng.random() < 0.3 else schedule, costs


@pytest.mark.parametrize("first", [0, pytest.param(30, marks=pytest.mark.slow)])
def test_it_takes_no_longer_and_no_more_memory_and_no_more_than_must_leaves(first: int) -> None:
    relieved = 0
    for seed in range(first, first + (30 if first == 0 else 600)):
        rng, schedule, costs = drawn(seed)
        before = gapless.simulate(schedule, costs)
        all_of_it = add_offload(schedule, costs)
        limit = max(before.peak) * Fraction(rng.randint(4, 10), 10)
        some = add_offload(schedule, costs, memory_limit=limit)
        for made in (all_of_it, some):
            gapless.verify(made).raise_if_wrong()
            after = gapless.simulate(made, costs)
            assert after.makespan == before.makespan, seed
            assert max(after.peak) <= max(before.peak), seed
        after = gapless.simulate(some, costs)
        for device in range(schedule.num_devices):
            if before.peak[device] <= limit:
                assert not [s for s, m in some.offloaded if schedule.placement.device(s, m) == device], seed
        relieved += max(after.peak) <= limit < max(before.peak)
    assert relieved > 5


def test_hosts_wait_for_a_copy_before_the_first_action_that_comes_after_it() -> None:
    waited = 0
    for seed in range(12):
        _, schedule, costs = drawn(seed)
        unknown = dataclasses.replace(costs, host_bandwidth=None, host_latency=0)
        made = add_offload(schedule, costs)
        for device, row in enumerate(made.rows):
            for known in (costs, unknown):
                found = ended_copies(made, known, device)
                times = {action: (start, end) for action, start, end in gapless.simulate(made, known).spans(device)}
                place = {copy: number for number, copies in enumerate(found) for copy in copies}
                assert sorted(place) == sorted(a for a in row if a.kind is Kind.OFFLOAD), seed
                for copy, number in place.items():
                    out, back = row.index(copy), row.index(copy._replace(kind=Kind.LOAD))
                    computed = [a for a in row[out + 1 :] if a.kind not in COPIES]
                    end = times[copy if known is costs else computed[0]][1]
                    assert out < number <= back, seed
                    assert number == back or times[row[number]][0] >= end, seed
                    assert all(times[action][0] < end for action in row[out + 1 : number]), seed
                    waited += number < back
    assert waited > 30


def test_more_bandwidth_or_a_higher_limit_never_needs_more_time() -> None:
    for seed in range(5):
        _, schedule, costs = drawn(seed)
        times = {
            gapless.simulate(add_offload(schedule, each, memory_limit=limit), each).makespan
            for factor in (1, 2, 8)
            for limit in (1, 2, 4, 8)
            for each in [gapless.Costs(**{**vars(costs), "host_bandwidth": (costs.host_bandwidth or 0) * factor})]
        }
        assert len(times) == 1, seed


def test_what_is_needed_soon_stays() -> None:
    schedule = gapless.make_schedule("1f1b", devices=4, microbatches=8)
    slow, quick = (add_offload(schedule, gapless.Costs(host_bandwidth=each)) for each in (0.1, 100))
    assert not slow.offloaded
    assert not [pair for pair in quick.offloaded if pair[0] == 3]  # its backwards follow at once
    assert {stage for stage, _ in quick.offloaded} == {0, 1, 2}
    only = add_offload(schedule, gapless.Costs(host_bandwidth=100), stages=[1])
    assert {stage for stage, _ in only.offloaded} == {1}
    assert add_offload(only, gapless.Costs()) is only  # it says itself what leaves


def test_neighbours_that_share_a_link_take_turns() -> None:
    schedule = gapless.make_schedule("gpipe", devices=2, microbatches=8)
    costs = gapless.Costs(host_bandwidth=Fraction(3, 2), host_share=2)
    made = gapless.simulate(add_offload(schedule, costs), costs)
    for kind in "OL":
        spans = sorted((start, end) for action, start, end in made.all_spans if action.kind == kind)
        assert len(spans) > 4
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
