"""naive, gpipe, 1f1b and eager-1f1b: their orders, bubbles and what a hop's latency costs them."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.schedule.costs import Costs
from gapless.schedule.memory import peaks
from gapless.schedule.recipes import make_schedule
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline
from tests.schedule.strategies import shares, times

devices = st.integers(1, 10)
microbatches = st.integers(1, 24)


def timeline(name: str, K: int, M: int, costs: Costs) -> Timeline:
    return simulate(make_schedule(name, devices=K, microbatches=M), costs)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("naive", ["0F0 0B0 0F1 0B1 0F2 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]),
        ("gpipe", ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]),
        ("1f1b", ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]),
        ("eager-1f1b", ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]),
    ],
)
def test_the_order_for_two_devices_and_three_microbatches(name: str, rows: list[str]) -> None:
    assert make_schedule(name, devices=2, microbatches=3).text().splitlines() == [
        f"{r}: {row}" for r, row in enumerate(rows)
    ]


@given(K=devices, M=microbatches, f=times, i=times, w=times)
def test_the_bubble_of_the_flushing_line_schedules_for_any_number_of_microbatches(
    K: int, M: int, f: Fraction, i: Fraction, w: Fraction
) -> None:
    for name in ("gpipe", "1f1b", "eager-1f1b"):
        found = timeline(name, K, M, Costs(f, i, w))
        assert found.work == M * (f + i + w)
        assert found.makespan == found.span == found.work + (K - 1) * (f + i + w)
        assert found.bubble == Fraction(K - 1, M + K - 1)


@given(K=devices, M=microbatches, f=times, i=times, w=times)
def test_naive_keeps_one_device_busy_at_a_time(K: int, M: int, f: Fraction, i: Fraction, w: Fraction) -> None:
    found = timeline("naive", K, M, Costs(f, i, w))
    assert found.makespan == found.work + M * (K - 1) * (f + i + w)
    assert found.peak == (1,) * K


@given(K=devices, M=microbatches)
def test_peaks_are_what_a_device_runs_ahead(K: int, M: int) -> None:
    def peak(name: str) -> list[float]:
        return [float(held) for held in peaks(make_schedule(name, devices=K, microbatches=M), Costs())]

    assert peak("gpipe") == [M] * K
    assert peak("1f1b") == [min(K - r, M) for r in range(K)]
    assert peak("eager-1f1b") == [min(2 * (K - r) - 1, M) for r in range(K)]


@given(K=st.integers(2, 8), rounds=st.integers(1, 4), f=times, b=times, latency=times)
def test_1f1b_has_no_slack_for_latency(K: int, rounds: int, f: Fraction, b: Fraction, latency: Fraction) -> None:
    M = K * rounds
    found = timeline("1f1b", K, M, Costs(f, b / 2, b / 2, latency=latency))
    extra = (Fraction(2 * (K - 1) * M, K) + 2 * (K - 2)) * latency
    assert found.makespan == (M + K - 1) * (f + b) + extra


@given(K=devices, M=microbatches, f=times, b=times, latency=times)
def test_gpipe_pays_each_hop_once_there_and_once_back(
    K: int, M: int, f: Fraction, b: Fraction, latency: Fraction
) -> None:
    found = timeline("gpipe", K, M, Costs(f, b / 2, b / 2, latency=latency))
    assert found.makespan == (M + K - 1) * (f + b) + 2 * (K - 1) * latency


@given(K=devices, M=microbatches, f=times, b=times, share=shares)
def test_eager_1f1b_hides_a_round_trip_no_longer_than_a_microbatch(
    K: int, M: int, f: Fraction, b: Fraction, share: Fraction
) -> None:
    latency = share * (f + b) / 2
    found = timeline("eager-1f1b", K, M, Costs(f, b / 2, b / 2, latency=latency))
    assert found.makespan == (M + K - 1) * (f + b) + 2 * (K - 1) * latency
