"""What waits for the second half of the backward, what does not, and that nothing stays behind."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.errors import GaplessError
from gapless.stage.batch.plain import plain_step
from gapless.stage.split.deferred import defer
from gapless.stage.stage import Remat, Stage
from tests.stage.exactness import assert_same_as_plain, make_stages, mean_square, run_step


def apply(function: Any, *args: Any) -> Any:
    """Runs a custom autograd function."""
    return function.apply(*args)


class Scale(torch.autograd.Function):
    """x * w, which defers the gradient of w by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad * w.detach(), defer(w, lambda: (grad * x).sum(0))


class Scaled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Any:
        return apply(Scale, x, self.w)


def test_weights_wait_for_the_second_half_and_norms_do_not() -> None:
    linear, norm, embedding, convolution = nn.Linear(8, 8), nn.LayerNorm(8), nn.Embedding(9, 8), nn.Conv1d(4, 4, 1)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    attend = lambda x: attention(x, x, x, need_weights=False)[0]  # noqa: E731
    scaled = Scaled(8)
    stage = Stage([embedding, linear, norm, attend, convolution, scaled], first_layer=0, split=True, loss=mean_square)
    stage.forward(0, torch.randint(9, (2, 4)), step=0)
    stage.backward_input(0, None)
    waiting = [linear, embedding, convolution, attention, scaled]
    assert all(parameter.grad is None for module in waiting for parameter in module.parameters())
    assert all(parameter.grad is not None for parameter in norm.parameters())
    stage.backward_weight(0)
    assert all(parameter.grad is not None for module in waiting for parameter in module.parameters())


def test_a_custom_function_that_defers_gives_the_plain_gradient() -> None:
    layers = [nn.Linear(8, 8), Scaled(8), nn.Tanh(), Scaled(8)]
    assert_same_as_plain(layers, torch.randn(6, 8), cuts=(2,))
    shared = Scaled(8)
    assert_same_as_plain([nn.Linear(8, 8), shared, nn.Tanh(), shared, shared], torch.randn(6, 8))


def test_gradients_that_a_closure_returns_for_two_parameters_are_not_one_tensor() -> None:
    class Shift(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            return x + a + b

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            a, b = ctx.saved_tensors
            both = grad.sum(0)
            return grad, defer(a, lambda: both), defer(b, lambda: both)

    a, b = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))
    shift = lambda x: apply(Shift, x, a, b)  # noqa: E731
    stage = Stage([shift], first_layer=0, split=True, loss=mean_square)
    stage.forward(0, torch.randn(4, 8), step=0)
    stage.backward(0, None)
    assert a.grad is not None
    assert b.grad is not None
    assert torch.equal(a.grad, b.grad)
    assert a.grad.data_ptr() != b.grad.data_ptr()


def test_outside_of_a_split_backward_a_closure_runs_at_once() -> None:
    w = nn.Parameter(torch.ones(2))
    value = defer(w, lambda: torch.full((2,), 3.0))
    assert value is not None
    assert value.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("split", [True, False])
def test_hooks_on_parameters_fire_once_per_microbatch(split: bool) -> None:
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    layers = [first, nn.LayerNorm(8), last]
    reference = copy.deepcopy(layers)
    fired: list[str] = []

    def double(grad: Tensor) -> Tensor:
        fired.append("hook")
        return grad * 2

    hooked: list[Any] = [first.weight, last.weight]
    hooked[0].register_hook(double)
    hooked[1].register_post_accumulate_grad_hook(lambda _: fired.append("post"))
    x = torch.randn(6, 8)
    run_step(make_stages(layers, (1,), mean_square, split=split), x, microbatches=3, split=split)
    assert sorted(fired) == ["hook"] * 3 + ["post"] * 3
    plain_step(reference, x, loss=mean_square, microbatches=3)
    plain = reference[0].weight.grad
    assert isinstance(plain, Tensor)
    assert first.weight.grad is not None
    assert torch.equal(first.weight.grad, plain * 2)


def _tensors_alive() -> int:
    gc.collect()
    return sum(1 for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter))


@pytest.mark.parametrize(("split", "remat"), [(True, "none"), (True, "layer"), (False, "stage")])
def test_nothing_stays_after_a_step(split: bool, remat: str) -> None:
    gc.freeze()  # what other tests have left is not looked through
    attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    layers = [nn.Embedding(9, 8), nn.Linear(8, 8), Scaled(8), attention, nn.Linear(8, 8)]
    stages = make_stages(layers, (2,), mean_square, split=split, remat=remat)
    x = torch.randint(9, (6, 4))
    for step in range(2):
        run_step(stages, x, microbatches=3, split=split, step=step)
    alive = _tensors_alive()
    assert alive
    for step in range(3):
        run_step(stages, x, microbatches=3, split=split, step=step)
    assert _tensors_alive() == alive


def test_tensors_die_by_reference_count_alone() -> None:
    """A deferred closure once held a tensor with its history, in a cycle through C++: 100 GB were gone in two steps."""
    born: list[weakref.ref[Tensor]] = []

    def watch(x: Tensor) -> Tensor:
        y = x * 2
        born.append(weakref.ref(y))
        return y

    layers: list[Callable[..., Any]] = [nn.Linear(8, 8), watch, nn.Linear(8, 8), watch, nn.LayerNorm(8), watch]
    gc.disable()
    try:
        stage = Stage(layers, first_layer=0, split=True)
        outputs = stage.forward(0, torch.randn(4, 8), step=0)
        handed_on = weakref.ref(outputs)
        grad = torch.ones_like(outputs)
        del outputs
        assert handed_on() is None, "what was handed on stays alive through its producer"
        stage.backward_input(0, [grad])
        assert len(stage._work[0].records) == 4
        stage.backward_weight(0)
        stage.forward(1, torch.randn(4, 8), step=0)
        stage.forward(2, torch.randn(4, 8), step=0)
        stage.backward_input(1, [torch.ones(4, 8)])
        stage.drop()
        assert stage.live == 0
        assert [ref() for ref in born] == [None] * len(born)
    finally:
        gc.enable()


def test_between_the_halves_only_what_the_second_needs_is_kept() -> None:
    kept: list[weakref.ref[Tensor]] = []
    freed: list[weakref.ref[Tensor]] = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            big = x * 2
            freed.append(weakref.ref(big))
            ctx.save_for_backward(big)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            kept.append(weakref.ref(grad))
            return grad * 1

    watch = lambda x: apply(Watch, x)  # noqa: E731
    stage = Stage([nn.Linear(8, 8), watch, nn.Linear(8, 8)], first_layer=0, split=True)
    out = stage.forward(0, torch.randn(4, 8), step=0)
    assert freed[0]() is not None
    stage.backward_input(0, [torch.ones_like(out)])
    assert freed[0]() is None
    stage.backward_weight(0)


def test_the_second_forward_of_a_microbatch_in_flight_is_refused() -> None:
    stage = Stage([nn.Linear(8, 8)], first_layer=0)
    stage.forward(0, torch.randn(2, 8), step=0)
    with pytest.raises(GaplessError, match="microbatch 0 is in flight already"):
        stage.forward(0, torch.randn(2, 8), step=0)


class Log:
    """What has a lock is not put back by a recompute."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.runs: list[int] = []


log = Log()


def test_each_layer_is_recomputed_once_also_with_a_split_backward() -> None:
    def counted(number: int) -> Any:
        def layer(x: Tensor) -> Tensor:
            log.runs.append(number)
            return x * 1

        return layer

    orders: list[tuple[Remat, list[int]]] = [("stage", [0, 1, 0, 1]), ("layer", [0, 1, 1, 0])]
    for remat, order in orders:
        stage = Stage(
            [counted(0), counted(1), nn.Linear(8, 8)], first_layer=0, split=True, remat=remat, loss=mean_square
        )
        for microbatch, x in enumerate(torch.randn(2, 2, 8)):
            log.runs.clear()
            stage.forward(microbatch, x, step=0)
            stage.recompute(microbatch)
            stage.backward_input(microbatch, None)
            stage.backward_weight(microbatch)
            assert log.runs == order


@pytest.mark.parametrize("whole", [torch.float64, torch.float32])
def test_what_autocast_leaves_in_double_precision_stays_so_where_weights_wait(whole: torch.dtype) -> None:
    # The input was cast down and met a weight in float64: "mat1 and mat2 must have the same dtype".
    layers = [nn.Linear(4, 4), nn.Sequential(nn.Conv1d(2, 2, 1), nn.Linear(4, 4)), nn.Linear(4, 4)]
    layers = [layer.to(whole) for layer in layers]
    assert_same_as_plain(
        layers, torch.randn(8, 2, 4, dtype=whole), context=lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    )


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("wanted", [torch.float32, None])
def test_gradients_that_wait_have_the_dtype_that_the_parameter_asks_for(wanted: Any, twice: bool) -> None:
    # "assigned grad has data of a different type", where autograd itself casts them.
    first = nn.Linear(4, 4, dtype=torch.bfloat16)
    layers = [first, nn.Linear(4, 4, dtype=torch.bfloat16), first if twice else nn.ReLU()]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.grad_dtype = wanted
    plain, x = copy.deepcopy(layers), torch.randn(8, 4, dtype=torch.bfloat16)
    for old, new in zip(layers, plain, strict=True):
        for one, other in zip(old.parameters(), new.parameters(), strict=True):
            other.grad_dtype = one.grad_dtype
    run_step(make_stages(layers, [], mean_square, split=True), x, microbatches=4, split=True)
    for part in x.chunk(4):
        for layer in plain:
            part = layer(part)
        (mean_square(part, None) / 4).backward()
    for old, new in zip(layers, plain, strict=True):
        for one, other in zip(old.parameters(), new.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert one.grad.dtype == other.grad.dtype
            assert torch.equal(one.grad, other.grad)


class Positions(nn.Module):
    """A table that is added through a view: for one sample, its gradient is a view of what the linear layer gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(6, 6), nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Any:
        return (self.linear(x) + self.table.unsqueeze(0)).tanh()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_that_waits_does_not_change_with_one_that_is_a_view_of_it(compiled: bool) -> None:
    # Later microbatches added to the table's gradient, and so to what the linear layer's waited with.
    model = nn.Sequential(*(Positions() for _ in range(4)))
    plain, x, y = copy.deepcopy(model), torch.randn(4, 4, 6), torch.randn(4, 4, 6)
    compile = {"backend": "aot_eager"} if compiled else False
    with gapless.Pipeline(model, devices=2, schedule="zb-h1", microbatches=4, loss=F.mse_loss, compile=compile) as pipe:
        for _ in range(2):
            pipe.step(x, y)
    for part, goal in zip((*x.chunk(4), *x.chunk(4)), (*y.chunk(4), *y.chunk(4)), strict=True):
        (F.mse_loss(plain(part), goal) / 4).backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad), name


class Workspace(nn.Module):
    """Its input is copied into memory that is made once."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear, self.memory = nn.Linear(width, width), torch.zeros(2, width)

    def forward(self, x: Tensor) -> Any:
        self.memory.copy_(x.detach())
        return self.linear(self.memory) + x


class Clamped(nn.Module):
    """Two layers get one gradient, which a hook changes in place when the first has seen it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        y = self.one(x)
        y.register_hook(lambda grad: grad.clamp_(-0.01, 0.01))
        return self.other(x) + y


@pytest.mark.parametrize(
    ("layer", "words"), [(Workspace, "a buffer that the forward of a later"), (Clamped, "a gradient by a hook")]
)
def test_what_a_weight_gradient_waits_with_may_not_change_meanwhile(layer: Callable[[], Any], words: str) -> None:
    # It was computed from the input of a later microbatch, or from the gradient that the hook had made.
    layers = [nn.Linear(6, 6), *(layer() for _ in range(4)), nn.Linear(6, 6)]
    options: dict[str, Any] = {"schedule": "zb-v", "microbatches": 4, "remat": "stage", "loss": F.mse_loss}
    with gapless.Pipeline(layers, devices=2, **options) as pipe, pytest.raises(GaplessError, match=words):
        pipe.step(torch.randn(8, 6), torch.randn(8, 6))
