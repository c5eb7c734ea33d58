"""A rank's copy of a model of which other ranks train a part."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gapless.errors import ConfigError
from tests.pipelines import Do
from tests.run.forked import Launch
from tests.run.ranks.watch.test_watch import pipeline


def forward(first: nn.Module, last: nn.Module, x: Tensor) -> Any:
    return last(torch.tanh(first(x)))


def copies() -> None:
    torch.manual_seed(0)
    model = Do(forward, nn.Linear(6, 6), nn.Linear(6, 6))
    with pipeline(model) as pipe:
        pipe.step(torch.randn(16, 6), torch.randn(16, 6))
        twice = copy.deepcopy(copy.deepcopy(model))
        calls: list[Callable[[], object]] = [twice.state_dict, model.state_dict, lambda: pickle.dumps(model)]
        for call in calls:
            with pytest.raises(ConfigError, match="other ranks train 2 of the"):
                call()
        whole = pipe.state_dict()
    twice.load_state_dict(whole)
    model.load_state_dict(whole)
    for each in (model, twice, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(torch.equal(value, whole[name]) for name, value in each.state_dict().items())


def test_a_copy_knows_that_other_ranks_train_a_part_of_it(launch: Launch) -> None:
    """The state_dict() of a deep copy, and torch.save(model), had initial values for what other ranks train."""
    launch(copies, 2)
