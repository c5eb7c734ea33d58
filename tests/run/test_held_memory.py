"""What holds the memory of a pipeline: sums that a user would write."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gapless
from gapless.run.execute import weighed
from gapless.stage.stage import Stage


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_weights_gradients_and_optimizer_add_up(schedule: str) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(8, 6)
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss, schedule=schedule) as pipe:
        before = pipe.memory(optimizer)
        pipe.step(x, x)
        optimizer.step()
        found = pipe.memory(optimizer)
        assert sum(each.optimizer for each in pipe.memory().stages) == 0
    assert [each.gradients for each in before.stages] == [0] * len(found.stages)
    assert [each.stage for each in found.stages] == list(range(pipe.schedule.num_stages))
    parameters, states = list(model.parameters()), list(optimizer.state.values())
    assert sum(each.weights for each in found.stages) == bytes_of([*parameters, *model.buffers()])
    assert sum(each.gradients for each in found.stages) == bytes_of(parameters)
    assert sum(each.optimizer for each in found.stages) == bytes_of([each for one in states for each in one.values()])
    assert not found.gpus
    assert {(each.activations, each.deferred) for each in found.stages} == {(None, None)}  # nobody measures them here
    assert repr(found).splitlines()[1].split().count("-") == 2
    headings = "stage device weights gradients optimizer copies activations deferred casts graphs"
    assert repr(found).splitlines()[0].split() == headings.split()


def test_copies_are_held_until_a_step_is_settled() -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(8, 6)
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss) as pipe:
        training = pipe.training(optimizer)
        weights = [*model.parameters()]  # to ask for them later would settle
        for _ in range(3):
            training.step(x, x)
        wanted = bytes_of([*weights, *(each for one in optimizer.state.values() for each in one.values())])
        end = time.monotonic() + 60
        while (held := sum(each.copies for each in pipe.memory().stages)) != wanted and time.monotonic() < end:
            time.sleep(0.01)
        assert held == wanted
        training.settle()
        assert sum(each.copies for each in pipe.memory().stages) == 0


@pytest.mark.parametrize(
    ("schedule", "activations", "deferred"),
    [("1f1b", [300, 200, 100], [0, 0, 0]), ("gpipe", [500] * 3, [0] * 3), ("zb-h1", [300, 200, 100], [0, 40, 80])],
)
def test_what_is_kept_follows_from_the_schedule(schedule: str, activations: list[int], deferred: list[int]) -> None:
    x = torch.randn(5, 6)
    with gapless.Pipeline(
        nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))),
        devices=3,
        microbatches=5,
        loss=F.mse_loss,
        schedule=schedule,
    ) as pipe:
        pipe.step(x, x)
        for stage in pipe._staged.stages.values():  # as if it were on a GPU, where these are measured
            stage.changes = {"F": [100, 100, 170], "I": [-60], "W": [-40], "B": [-100]}
        found = pipe.memory().stages
    assert [each.activations for each in found] == activations
    assert [each.deferred for each in found] == deferred


def test_the_second_step_is_weighed() -> None:
    """What a GPU tells is a number here, which every call changes by another amount."""
    schedule = gapless.make_schedule("zb-h1", devices=2, microbatches=4)
    row, stages = schedule.rows[0], {0: Stage([nn.Linear(2, 2)], first_layer=0)}
    allocated = [0]
    change = {"F": 100, "I": -60, "W": -40, "B": -100}
    add: Callable[[int], None] = lambda by: allocated.append(allocated[-1] + by)  # noqa: E731
    calls: list[Callable[[], object]] = [partial(add, change[action.kind.value]) for action in row]
    for step in range(3):
        now = weighed(calls, row, stages, lambda: allocated[-1])
        assert (now == calls) == (step != 1)
        for call in now:
            call()
    kinds = [action.kind.value for action in row]
    assert stages[0].changes == {kind: [change[kind]] * kinds.count(kind) for kind in dict.fromkeys(kinds)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_activations_on_a_gpu_are_what_layers_keep() -> None:
    wide, rows, count = 512, 8192, 6
    model = nn.Sequential(*(nn.Sequential(nn.Linear(wide, wide), nn.Tanh()) for _ in range(4))).cuda()
    x = torch.randn(rows, wide, device="cuda")
    with gapless.Pipeline(
        model, devices=["cuda:0"], microbatches=count, loss=F.mse_loss, schedule="gpipe", graphs=False
    ) as pipe:
        for _ in range(3):
            pipe.step(x, x)
        (stage,) = pipe.memory().stages
    one = rows // count * wide * 4
    # Each tanh keeps its result, and torch's mse_loss as much below the scalar that it returns.
    assert stage.activations == pytest.approx(count * 5 * one, rel=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_graphs_and_casts_count_on_a_gpu() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).cuda()
    x = torch.randn(8, 64, device="cuda")
    with gapless.Pipeline(model, devices=["cuda:0"], microbatches=4, loss=F.mse_loss, graphs=True) as pipe:
        for _ in range(6):
            with torch.autocast("cuda", torch.bfloat16):
                pipe.step(x, x)
        (stage,), gpus = pipe.memory().stages, pipe.memory().gpus
    assert stage.casts == bytes_of(list(model.parameters())) // 2
    assert stage.graphs > 0
    assert gpus["cuda:0"][0] >= stage.weights + stage.gradients + stage.casts
