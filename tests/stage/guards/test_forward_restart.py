"""As far as a user can tell, a forward runs once per microbatch: against a loop that shares nothing with gapless."""

import collections
import copy
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gapless
from gapless.stage.random.exclusive import exclusively
from gapless.stage.stage import Stage
from tests.stage.state_loops import assert_same_as_loop

M = 4


class Keeper(nn.Module):
    """Keeps what a module may keep, and computes with it."""

    total: Tensor

    def __init__(self, buffer_from: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.calls, self.mean, self.in_place = 0, torch.zeros(()), torch.zeros(6)
        self.seen: list[float] = []
        self.counter: collections.Counter[str] = collections.Counter()
        self.nested = Nested()
        self.buffer_from = buffer_from
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.mean = 0.9 * self.mean + x.detach().mean()
        self.in_place.add_(x.detach()[0])
        self.seen.append(float(self.mean))
        self.counter["calls"] += 1
        self.nested.number += 1
        if self.calls > self.buffer_from:
            self.total.add_(x.detach().mean())
        scale = 1 + 0.01 * self.calls + 0.1 * self.seen[-1] + 0.01 * self.nested.number + 0.1 * self.total
        return self.linear(x) * scale + 0.1 * self.in_place

    def state(self) -> Any:
        return self.calls, self.seen, dict(self.counter), self.nested.number, float(self.total), self.in_place.tolist()


class Nested:
    number = 0


@torch.jit.script
def drawn_in_script(x: Tensor) -> Tensor:
    return x + 0.1 * torch.rand_like(x)


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


def unseen_draw(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(drawn_in_script(F.dropout(x, 0.2)))  # type: ignore[no-any-return]


def draw_in_checkpoint(layer: nn.Linear, x: Tensor) -> Any:
    return checkpoint(lambda x: F.dropout(layer(x), 0.3), F.dropout(x, 0.1), use_reentrant=False)


def own_autocast(layer: nn.Linear, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = layer(x) + layer(2 * x)
    return made.float()


def two_ways(layer: nn.Linear, x: Tensor) -> Tensor:
    x = layer(layer(x).tanh() * layer.weight.sum()).tanh() + layer.weight.mean()
    return layer(x) * layer.weight.std() + layer.bias  # type: ignore[no-any-return]


def hidden_use(layer: nn.Linear, x: Tensor) -> Any:
    return Hidden.apply(layer(x), layer.weight)  # type: ignore[no-untyped-call]


def gradient_inside(layer: nn.Linear, x: Tensor) -> Any:
    made = layer(x).tanh()
    (grad,) = torch.autograd.grad(made.sum(), layer.weight, create_graph=True)
    return made + 0.01 * grad.sum()


def in_place(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(x.mul_(0.5))  # type: ignore[no-any-return]


WAYS = (unseen_draw, draw_in_checkpoint, own_autocast, two_ways, hidden_use, gradient_inside, in_place)
outside: list[str] = []  # what nobody can put back


class Learner(nn.Module):
    """Does something from its n-th call on that gapless must learn of."""

    def __init__(self, way: Any, start: int) -> None:
        super().__init__()
        self.linear, self.way, self.start, self.calls = nn.Linear(6, 6), way, start, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        outside.append(self.way.__name__)
        return self.way(self.linear, x) if self.calls > self.start else self.linear(x)  # type: ignore[no-any-return]

    def state(self) -> int:
        return self.calls


def states(layers: Sequence[Any]) -> list[Any]:
    return [copy.deepcopy(layer.state()) for layer in layers if isinstance(layer, (Keeper, Learner))]


def compare(make: Callable[[], nn.Sequential], **options: Any) -> None:
    asked: dict[str, Any] = {"devices": 3, "partition": [1, 3, 1], "microbatches": M, "state": states, **options}
    assert_same_as_loop(lambda clock: (list(make()), F.mse_loss), **asked)


def model_of(way: Any, start: int, **options: Any) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(Keeper(), Learner(way, start), Keeper(**options), nn.Linear(6, 6), Keeper())


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("way", WAYS)
def test_a_forward_that_teaches_something_leaves_the_traces_of_one_run(way: Any, start: int) -> None:
    compare(lambda: model_of(way, start), schedule="zb-h1", steps=3)


@pytest.mark.parametrize("way", [unseen_draw, draw_in_checkpoint, in_place])
def test_so_it_does_where_the_backward_is_not_split(way: Any) -> None:
    compare(lambda: model_of(way, 0), schedule="1f1b", steps=2)


@pytest.mark.parametrize("way", [unseen_draw, draw_in_checkpoint, two_ways, hidden_use, in_place])
def test_what_nobody_can_put_back_happens_once(way: Any) -> None:
    model = model_of(way, 0)
    outside.clear()
    with gapless.Pipeline(model, devices=3, schedule="zb-h1", microbatches=M, loss=F.mse_loss) as pipe:
        pipe.step(torch.randn(8, 6), torch.randn(8, 6))
    assert len(outside) == M


def test_a_draw_that_nobody_sees_is_noticed_though_another_thread_is_at_the_generators() -> None:
    model, reference = Learner(unseen_draw, 2), Learner(unseen_draw, 2)
    reference.load_state_dict(model.state_dict())
    stage, x = Stage([model], first_layer=0, seed=0), torch.randn(4, 6)
    there, holder = threading.Event(), threading.Thread(target=lambda: hold(there))
    for step in range(3):
        if step == 2:
            holder.start()
            there.wait()
        torch.manual_seed(gapless.seed_of(0, step, step, 0))
        wanted = reference(x)
        assert torch.equal(stage.forward(step, x, step=step), wanted), step
    holder.join()


def hold(there: threading.Event) -> None:
    with exclusively():
        there.set()
        time.sleep(0.2)


def test_a_buffer_that_begins_to_change_changes_once_where_the_stage_is_recomputed() -> None:
    compare(
        lambda: nn.Sequential(nn.Linear(6, 6), Late(), nn.Linear(6, 6)),
        schedule="1f1b",
        steps=2,
        partition=[1, 1, 1],
        remat="stage",
        state=lambda layers: int(layers[1].number),
    )


class Late(nn.Module):
    calls: Tensor
    number: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("number", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        if self.calls > 5:
            self.number.add_(1)
        return x * (1 + self.number)


class Both(Learner):
    first = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.calls >= self.start:
            self.first += 1
        return super().forward(x)


def test_what_begins_to_change_in_a_forward_that_starts_again_is_refused() -> None:
    # It has changed twice by then, and nobody knows what it was.
    stage = Stage([Both(gradient_inside, 5)], first_layer=0, split=True)
    x = torch.randn(2, 6, requires_grad=True)
    for number in range(5):
        stage.forward(number, x, step=0)
    with pytest.raises(gapless.GaplessError, match=r"asks for gradients .* has changed Both.first a second time: let"):
        stage.forward(5, x, step=0)


def test_a_batch_norm_that_has_counted_what_was_drawn_wrongly_is_refused() -> None:
    # Its statistics move once for a forward, however often that runs: they were those of the run that did not count.
    stage = Stage([Learner(unseen_draw, 2), nn.BatchNorm1d(6)], first_layer=0)
    for number in range(2):
        stage.forward(number, torch.randn(4, 6), step=0)
    with pytest.raises(
        gapless.GaplessError, match=r"draws random numbers in a new way .* statistics of a batch norm: let"
    ):
        stage.forward(2, torch.randn(4, 6), step=0)


def test_all_that_a_layer_can_reach_is_put_back() -> None:
    calls = [0]
    numbers, own = {"calls": 0}, random.Random(3)

    def function(x: Tensor) -> Any:
        numbers["calls"] += 1
        calls[0] += 1
        function.calls += 1  # type: ignore[attr-defined]
        own.random()
        return gradient_inside(layer, x)

    function.calls = 0  # type: ignore[attr-defined]
    layer, start = nn.Linear(6, 6), own.getstate()
    stage = Stage([function], first_layer=0, split=True)
    stage.forward(0, torch.randn(2, 6, requires_grad=True), step=0)
    once = random.Random()
    once.setstate(start)
    once.random()
    assert (numbers, calls, function.calls) == ({"calls": 1}, [1], 1)  # type: ignore[attr-defined]
    assert own.getstate() == once.getstate()


@pytest.mark.in_pairs
@pytest.mark.parametrize("which", [0, 2, 3])
@pytest.mark.parametrize("only", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_a_weight_that_some_microbatches_use_in_a_second_way_gets_their_gradients_in_order(
    which: int, only: bool, first: bool
) -> None:
    # Their parts came with the input gradients, before those of earlier microbatches that were to wait.
    class Sometimes(Learner):
        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if (self.calls - 1) % M != which:
                return self.linear(self.linear(x).tanh())  # type: ignore[no-any-return]
            weight = self.linear.weight
            if first:
                x = x * weight.sum() + weight.mean() + self.linear.bias
            x = x if only else self.linear(self.linear(x).tanh())
            return x if first else x * weight.std() + weight.mean() * self.linear.bias

    layers = lambda: nn.Sequential(Keeper(), Sometimes(two_ways, 0), Keeper(), nn.Linear(6, 6), Keeper())  # noqa: E731
    compare(layers, schedule="zb-h1", steps=2)
