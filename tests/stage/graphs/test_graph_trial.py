"""Whether a replay may stand for an eager run."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gapless.stage.graphs.graph_trial import Trial, distance


def runs(*results: Tensor) -> Callable[[], Tensor]:
    following: Iterator[Tensor] = iter(results)
    return lambda: next(following)


def test_equal_bits_are_no_distance_and_anything_else_is_some() -> None:
    x = torch.tensor([3.0, 4.0])
    assert distance([x, torch.tensor([math.nan])], [x.clone(), torch.tensor([math.nan])]) == 0.0
    assert distance([x], [torch.tensor([3.0, 4.5])]) == 0.1
    nans = torch.tensor([0x7FC00000, 0x7FFFE000, 0x7F800000], dtype=torch.int32).view(torch.float32)
    assert distance(nans, nans[[1, 0, 2]]) == 0.0  # numbers that are none have many bits
    assert distance(torch.cat([x, nans]), torch.cat([torch.tensor([3.0, 4.5]), nans[[1, 0, 2]]])) == 0.1
    assert distance(nans, nans[[0, 2, 1]]) == math.inf
    assert distance(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])) > 0.0
    for other in (x.double(), x[:1], torch.tensor([3.0, math.nan]), [x, x.clone()]):
        assert distance(x, other) == math.inf
    assert distance(torch.tensor([1]), torch.tensor([2])) == math.inf


def test_a_replay_that_differs_is_taken_only_where_eager_runs_differ_about_as_much() -> None:
    x = torch.ones(100)
    trial = Trial()
    trial.compare(x, x.clone())
    assert trial.verdict(runs(), runs(), faster=False) is None
    trial.compare(x, x * 1.001)
    assert trial.verdict(runs(x, x * 1.001), runs(), faster=False) is None
    assert (
        trial.verdict(runs(*[x] * 33), runs(), faster=False)
        == "a replay differs from the eager run by 0.001, and two of those by 0"
    )
    assert trial.verdict(runs(x, x * 1.0001), runs(), faster=False)
    half = Trial()
    half.compare(x.bfloat16(), x.bfloat16() * 1.01)
    assert half.verdict(runs(x.bfloat16(), torch.cat([x[1:], x[:1] * 1.01]).bfloat16()), runs(), faster=False) is None
    assert half.verdict(runs(*[x.bfloat16()] * 33), runs(*[x.bfloat16() * 1.01] * 32), faster=False)
    trial.compare(x, x * math.nan)
    assert trial.verdict(runs(x, x * math.nan), runs(), faster=False)


def test_a_replay_that_differs_once_is_forgiven_if_another_has_the_bits() -> None:
    x = torch.ones(100)
    trial = Trial()
    trial.compare(x, torch.cat([x[1:], x[:1] * (1 + 1e-6)]))
    assert trial.verdict(runs(*[x] * 33), runs(x * 1.0001, x), faster=False) is None
    trial.compare(x, x * 1.001)  # by more than what rounding does, whatever comes after it
    assert trial.verdict(runs(*[x] * 33), runs(x), faster=False)


def test_graphs_that_are_not_faster_are_said_so_only_where_that_was_asked() -> None:
    trial = Trial()
    trial.eager, trial.graphed = 1.0, 1.0
    assert trial.verdict(runs(), runs(), faster=False) is None
    assert "not faster" in str(trial.verdict(runs(), runs(), faster=True))
