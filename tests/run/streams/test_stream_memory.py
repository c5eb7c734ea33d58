"""What the versions of a stream take, and that nothing of them is left behind."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

from gapless.run.streams.stream import Stream
from tests.pipelines import resident
from tests.run.streams.test_stream import RULES, adam, batches, make, momentum, pipeline

KEPT = {"stashing": [4, 3, 2, 1], "vertical": [4, 4, 4, 4], "2bw": [2, 2, 2, 2]}


@pytest.mark.in_pairs
@pytest.mark.parametrize("kind", ["stashing", "vertical", "2bw"])
@pytest.mark.parametrize("correction", [None, "spectrain"])
@pytest.mark.parametrize("frozen", [False, True])
def test_weight_bytes_are_those_of_the_formula(kind: str, correction: Any, frozen: bool) -> None:
    """Stashing K - r versions, vertical sync K, 2bw 2, and one more where weights are predicted, which they are not
    without delay. What never changes is there once.
    """
    with pipeline(kind, make("dropout"), 4) as pipe:
        for layer in pipe.module().children():
            layer.norm.requires_grad_(not frozen)
        with pipe.stream(optimizer=momentum, vertical=RULES[kind][1], correction=correction) as stream:
            found = []
            for _ in range(3):
                list(stream.run(batches(9)))
                stream.drain()
                found.append(stream.weight_bytes)
    norm, linear = 2 * 4 * 12, 2 * 4 * (36 + 6)  # of a stage's two layers
    delays = [each - 1 for each in KEPT[kind]]
    kept = [each + (correction is not None and delay > 0) for each, delay in zip(KEPT[kind], delays, strict=True)]
    assert found == [[each * linear + (1 if frozen else each) * norm for each in kept]] * 3


@pytest.mark.parametrize("kind", ["stashing", "2bw"])
def test_there_is_no_version_more_while_an_update_is_made(kind: str) -> None:
    most: dict[int, int] = {}

    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for number, device in enumerate(stream._devices):
                if device.updater.optimizer is self:
                    most[number] = max(most.get(number, 0), device.versions.num_bytes)
            super().step(closure)

    with (
        pipeline(kind, make("dropout"), 4) as pipe,
        pipe.stream(optimizer=lambda params: Counts(params, lr=0.1)) as stream,
    ):
        list(stream.run(batches(9)))
        stream.drain()
        assert [most[number] for number in range(4)] == stream.weight_bytes


def what_is_there(stream: Stream) -> tuple[int, int, list[int], list[int]]:
    """Parameters and tensors of this process, and of each stage versions and leaves to be used again."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    versions = [device.versions for device in stream._devices]
    free = [len(leaves) for each in versions for leaves in each._free]
    return sum(isinstance(each, nn.Parameter) for each in tensors), len(tensors), [len(each) for each in versions], free


def stays_flat(kind: str, rounds: int, count: int, **options: Any) -> None:
    data = batches(count)
    with pipeline(kind, make("dropout"), 4) as pipe, pipe.stream(vertical=RULES[kind][1], **options) as stream:
        before = None
        for _ in range(rounds):
            for _ in stream.run(data):
                pass
            stream.drain()
            before = before or what_is_there(stream)
        assert what_is_there(stream) == before
        assert stream.minibatches == rounds * count


@pytest.mark.parametrize("kind", ["stashing", "vertical", "2bw"])
def test_no_version_is_left_behind(kind: str) -> None:
    stays_flat(kind, 2, 9, optimizer=adam, correction="spectrain", split=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stashing", "vertical", "2bw"])
def test_memory_is_flat_over_5000_minibatches(kind: str) -> None:
    stays_flat(kind, 2, 250, optimizer=momentum)  # what torch and Python take once
    before = resident()
    stays_flat(kind, 20, 250, optimizer=momentum)
    assert resident() - before < 4 << 20
