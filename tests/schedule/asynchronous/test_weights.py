"""Versions of the weights: the formulas of the papers, and what verify makes of a forward that comes too early."""

import pytest

from gapless.schedule.action import Schedule
from gapless.schedule.asynchronous.weights import weight_versions
from gapless.schedule.recipes import make_schedule
from gapless.schedule.verify import verify


@pytest.mark.parametrize("K", [1, 2, 3, 5, 8])
def test_pipedream_sees_what_its_formula_says(K: int) -> None:
    schedule = make_schedule("pipedream", devices=K, microbatches=4 * K)
    found = weight_versions(schedule)
    assert found.seen == {(r, m): max(0, m - (K - 1 - r)) for r in range(K) for m in range(4 * K)}
    assert found.kept == tuple(K - r for r in range(K))
    assert found.behind == tuple(K - 1 - r for r in range(K))


@pytest.mark.parametrize(("K", "M"), [(2, 2), (3, 3), (3, 5), (4, 8)])
def test_2bw_is_always_one_behind_with_two_versions(K: int, M: int) -> None:
    schedule = make_schedule("2bw", devices=K, microbatches=M, minibatches=5)
    found = weight_versions(schedule)
    assert found.seen == {(r, m): max(0, m // M - 1) for r in range(K) for m in range(5 * M)}
    assert found.kept == (2,) * K
    assert found.behind == (1,) * K


def test_a_forward_before_the_update_that_makes_its_version_is_refused() -> None:
    ahead = "0: 0F0 0F1 0B0 0F2 0F3 0F4 0B1 0U0 0F5 0B2 0B3 0U1 0B4 0B5 0U2"  # minibatches of two
    assert [each.message for each in verify(Schedule.parse(ahead)).violations] == [
        "0F4 uses version 1 of its weights, but 0U0 comes later"
    ]


def test_replicas_count_their_own_updates() -> None:
    schedule = make_schedule("pipedream", devices=3, microbatches=9, replicas=[2, 1])
    found = weight_versions(schedule)
    assert [found.seen[0, m] for m in range(9)] == [0, 0, 0, 0, 1, 1, 2, 2, 3]
    assert found.behind == (1, 0)
