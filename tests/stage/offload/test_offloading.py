"""Activations in the host's memory: the bits of the plain loop, memory that is really free, nothing left behind."""

import copy
import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

import gapless
from gapless.errors import ConfigError, GaplessError, ScheduleError
from gapless.stage.offload.host_link import CpuLink
from gapless.stage.stage import Stage
from tests.pipelines import Do, assert_same_gradients
from tests.run.forked import Launch

WIDTH, MICROBATCHES = 40, 6  # a microbatch has 4,800 bytes
X, Y = torch.randn(2, 3 * MICROBATCHES, 10, WIDTH, generator=torch.Generator().manual_seed(1)).unbind()
COSTS = gapless.Costs(boundary=0.1, recompute=1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 60), nn.Linear(60, WIDTH)

    def forward(self, x: Tensor) -> Any:
        wide = torch.tanh(self.wide(self.norm(x)))
        first, second = wide.view(*wide.shape[:-1], 2, 30).unbind(-2)  # two views of one storage are saved
        return x + self.narrow(torch.cat([first * second, second], -1))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(6)])


def loop(plain: nn.Module, steps: int, context: Callable[[], Any]) -> list[Tensor]:
    """What a user would write."""
    losses = []
    for _ in range(steps):
        for x, y in zip(X.tensor_split(MICROBATCHES), Y.tensor_split(MICROBATCHES), strict=True):
            with context():
                loss = F.mse_loss(plain(x), y)
            (loss / MICROBATCHES).backward()
            losses.append(loss.detach())
    return losses


CASES = [
    ("gpipe", "none", False),
    ("1f1b", "none", True),
    ("1f1b", "stage", False),
    ("interleaved", "layer", False),
    ("zb-h1", "none", False),
    ("zb-h2", "stage", True),
    ("zb-v", "none", True),
]


@pytest.mark.parametrize(("schedule", "remat", "low"), CASES)
def test_gradients_and_losses_are_those_of_the_plain_loop(schedule: str, remat: Any, low: bool) -> None:
    def context() -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=low)

    ours, plain = model(), model()
    options: dict[str, Any] = {"schedule": schedule, "remat": remat, "offload": "activations", "costs": COSTS}
    with gapless.Pipeline(ours, devices=2, microbatches=MICROBATCHES, loss=F.mse_loss, **options) as pipe:
        assert pipe.schedule.offloaded
        assert f"of {MICROBATCHES} microbatches offloaded" in str(pipe)
        found: list[Tensor] = []
        for _ in range(2):
            with context():
                found += pipe.step(X, Y).losses
        pipe.evaluate(X, Y)
    assert all(map(torch.equal, found, loop(plain, 2, context)))
    assert_same_gradients(ours, plain)


class Spy(nn.Module):
    """Notes the memory of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        self.seen.append(StorageWeakRef(y.untyped_storage()))
        return y


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("remat", ["none", "stage"])
def test_what_is_in_the_hosts_memory_is_free_on_the_device(split: bool, remat: Any) -> None:
    spy, link = Spy(), CpuLink()
    stage = Stage([nn.Linear(WIDTH, WIDTH), spy, nn.Linear(WIDTH, WIDTH)], first_layer=0, split=split, remat=remat)
    given = X[:3].clone().requires_grad_()
    held = StorageWeakRef(given.untyped_storage())
    outputs = stage.forward(0, given, step=0, leaves=True)
    del given
    assert not held.expired()
    stage.offload(0, link)
    assert all(each.expired() for each in spy.seen)
    assert held.expired() == (remat == "stage")  # else it is an end of the graph
    stage.load(0, link)
    stage.recompute(0)
    (grad,) = stage.backward_input(0, [torch.ones_like(outputs)])
    stage.backward_weight(0)
    spy.seen.clear()  # these can't be copied
    plain = copy.deepcopy(stage.layers)
    for layer in plain:
        layer.zero_grad()
    x = X[:3].clone().requires_grad_()
    nn.Sequential(*plain)(x).backward(torch.ones_like(outputs))
    assert grad is not None
    assert x.grad is not None
    assert torch.equal(grad, x.grad)
    assert_same_gradients(nn.Sequential(*stage.layers), nn.Sequential(*plain))


def test_a_storage_leaves_once_and_weights_and_inputs_stay() -> None:
    class Counts(CpuLink):
        def out(self, tensors: list[Tensor]) -> list[Tensor]:
            sizes.extend(tensor.numel() for tensor in tensors)
            return super().out(tensors)

    sizes: list[int] = []
    stage = Stage([Block()], first_layer=0)
    for microbatch in range(2):  # the first one learns whether a layer changes its input, which it copies
        stage.forward(microbatch, X[:3].clone().requires_grad_(), step=0, leaves=True)
    stage.offload(1, Counts())
    rows = 3 * 10 * 4
    # The norm's result, `wide` with two views of it, and what is concatenated; the norm's statistics are small.
    assert sorted(sizes) == sorted([rows * WIDTH, rows * 60, rows * 60])


def test_a_long_run_reserves_no_more_than_its_first_step() -> None:
    with gapless.Pipeline(
        model(), devices=2, microbatches=MICROBATCHES, loss=F.mse_loss, offload="activations"
    ) as pipe:
        reserved = []
        for _ in range(4):
            pipe.step(X, Y)
            lanes = pipe._staged.program(MICROBATCHES, inference=False).lanes
            reserved.append([sum(map(len, lane.link._free.values())) for lane in lanes])
    assert reserved[0] == reserved[-1]
    assert reserved[0][0] > 0


class _Fails(torch.autograd.Function):
    """In the backward of a microbatch, once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, calls: Any) -> Tensor:
        ctx.calls = calls
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if next(ctx.calls) == 2:
            raise ValueError("on purpose")
        return grad, None


def test_after_a_step_that_fails_the_next_one_has_the_bits_of_the_loop() -> None:
    ours, plain, calls = model(), model(), itertools.count(1)
    fails: Any = _Fails.apply
    layers = nn.Sequential(*ours, Do(lambda x: fails(x, calls)))
    options: dict[str, Any] = {"microbatches": MICROBATCHES, "loss": F.mse_loss, "offload": "activations"}
    with gapless.Pipeline(layers, devices=2, **options) as pipe:
        with pytest.raises(ValueError, match="on purpose"):
            pipe.step(X, Y)
        ours.zero_grad()
        pipe.step(X, Y)
    loop(plain, 1, lambda: torch.autocast("cpu", enabled=False))
    assert_same_gradients(ours, plain)


def changes(x: Tensor) -> Tensor:
    """What was saved is changed in place afterwards, which torch tells of in the backward."""
    y = torch.exp(x)
    z = y * 2
    y.add_(1)
    return z


def into(memory: Tensor) -> Callable[[Any, Tensor], Tensor]:
    """A layer that copies its input into memory, of a size that stays where it is."""
    return lambda part, x: x + part(memory[: len(x)].copy_(x.detach()))


@pytest.mark.parametrize("small", [False, True])
def test_what_was_changed_since_it_was_saved_is_told_of_as_ever(small: bool) -> None:
    # Small: weight gradients were computed from the inputs of later microbatches.
    x, y = (X[:, :1], Y[:, :1]) if small else (X, Y)
    odd = Do(into(torch.zeros(len(X), 1, WIDTH)), nn.Linear(WIDTH, WIDTH)) if small else Do(changes)
    layers = [nn.Linear(WIDTH, WIDTH), odd, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    with gapless.Pipeline(layers, devices=2, microbatches=4, loss=F.mse_loss, offload="activations") as pipe:
        assert pipe.schedule.offloaded
        with pytest.raises(GaplessError, match="needs a tensor that was changed in place since its forward"):
            pipe.step(x, y)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"offload": "auto"}, r"offload='auto' offloads what memory_limit= asks for: give one, or"),
        ({"offload": True}, r"offload is True, but it must be one of none, activations, auto, or a list"),
        ({"offload": "weights"}, r"offload is 'weights', but it must be 'none' or 'activations' or 'auto'"),
        ({"offload": ["none", "auto"]}, r"offload is 'auto', but it must be 'none' or 'activations'"),
        ({"offload": ["none"]}, r"offload lists 1 stages, but the schedule has 2"),
        ({"offload": "activations", "schedule": "2bw"}, r"2bw runs in streams, which keep their activations"),
    ],
)
def test_what_can_not_be_offloaded_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        gapless.Pipeline(model(), devices=2, microbatches=2, loss=F.mse_loss, **options)


def test_as_much_leaves_as_the_limit_asks_for() -> None:
    def offloaded(**options: Any) -> int:
        with gapless.Pipeline(model(), devices=2, schedule="gpipe", microbatches=6, loss=F.mse_loss, **options) as pipe:
            return len(pipe.schedule.offloaded)

    assert offloaded(offload="auto", memory_limit=6) == 0
    assert 0 < offloaded(offload="auto", memory_limit=4) < offloaded(offload="activations")
    assert offloaded(offload=["activations", "none"]) == 6


@pytest.mark.parametrize("seed", range(30))
def test_a_pipeline_stays_below_its_memory_limit_as_simulated_or_says_that_it_can_not(seed: int) -> None:
    rng = random.Random(seed)
    forward, input_grad, weight_grad = rng.choices((1, 2, 3), k=3)
    activation, link = (
        rng.choice((1, 4)),
        {"host_bandwidth": rng.choice((0.2, 2, 20)), "host_share": rng.choice((1, 2))},
    )
    costs = gapless.Costs(forward, input_grad, weight_grad, activation=activation, **link)
    limit = rng.choice(("1x", "0.75x", 2, 8, 0.5))
    options: Any = {"schedule": rng.choice(("1f1b", "gpipe", "zb-h1", "interleaved")), "memory_limit": limit}
    options |= {"offload": rng.choice(("none", "activations", "auto")), "remat": rng.choice(("none", "stage"))}
    layers = [nn.Linear(2, 2) for _ in range(8)]
    most = limit if not isinstance(limit, str) else float(limit[:-1]) * 4 * activation  # of 1f1b on 4 devices
    peak, said = 0.0, ""
    try:
        with gapless.Pipeline(layers, devices=4, microbatches=8, loss=F.mse_loss, costs=costs, **options) as pipe:
            peak = float(max(gapless.simulate(pipe.schedule, costs).peak))
    except ScheduleError as error:
        said = str(error)
    assert peak <= most
    assert bool(peak) != bool(re.search(rf"holds [\d.]+ on a device, .* above memory_limit={most:g}: raise", said))


def trains_on_ranks() -> None:
    ours, plain = model(), model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    with gapless.Pipeline(
        ours, mesh=mesh, schedule="zb-h1", microbatches=MICROBATCHES, loss=F.mse_loss, offload="activations"
    ) as pipe:
        pipe.step(X, Y)
        own = {name for name, parameter in ours.named_parameters() if parameter.grad is not None}
    loop(plain, 1, lambda: torch.autocast("cpu", enabled=False))
    assert own
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert name not in own or torch.equal(mine.grad, theirs.grad), name  # type: ignore[arg-type]


def test_on_ranks_too(launch: Launch) -> None:
    launch(trains_on_ranks, 2)
