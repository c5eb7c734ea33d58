"""Every model here gives the bits of the plain loop: split or not, remat or not, over two steps without zero_grad."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.stage.stage import Stage
from tests.pipelines import Do, Own
from tests.stage.exactness import assert_same_as_plain, mean_square


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6, 12), (6, 5, 12), (6, 3, 4, 12), (6, 1, 12), (6, 0, 12)])
def test_linear_of_every_dimension(shape: tuple[int, ...], bias: bool) -> None:
    layers = [nn.Linear(12, 9, bias=bias), nn.Tanh(), nn.Linear(9, 12, bias=bias)]
    loss = mean_square if 0 not in shape else lambda outputs, _: outputs.sum()
    assert_same_as_plain(layers, torch.randn(shape), cuts=(1,), loss=loss)


@pytest.mark.parametrize("loss_weight", [None, "sum"])
@pytest.mark.parametrize("loss", [F.mse_loss, nn.MSELoss(), nn.BCEWithLogitsLoss(pos_weight=torch.rand(12))])
def test_a_loss_of_torch_after_layers_of_torch(loss: Any, loss_weight: Any) -> None:
    layers = [nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 12), nn.ReLU(inplace=True)]
    assert_same_as_plain(layers, torch.randn(7, 12), torch.rand(7, 12), cuts=(2,), loss=loss, loss_weight=loss_weight)


def test_a_gradient_is_laid_out_as_the_target_has_it() -> None:
    """The gradient of what the last stage gets has the layout of the target, and the stage before it sums it so."""
    layers = [nn.Linear(12, 12), nn.Tanh()]
    for target in (torch.randn(6, 5, 12), torch.randn(6, 12, 5).transpose(1, 2)):
        assert_same_as_plain(layers, torch.randn(6, 5, 12), target, cuts=(1,), loss=F.mse_loss)


def test_a_hook_of_the_loss_is_called_each_time() -> None:
    calls: list[int] = []
    loss = nn.MSELoss()
    stage = Stage([nn.ReLU()], first_layer=0, loss=loss)
    handle = None
    for microbatch in range(4):
        if microbatch == 2:
            handle = loss.register_forward_hook(lambda *_: calls.append(1))
        stage.forward(microbatch, torch.ones(2, requires_grad=True), step=0, target=torch.zeros(2))
        stage.backward(microbatch, None)
    assert handle is not None
    assert len(calls) == 2


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, 1),
    "sliced": lambda x: x[..., ::2],
    "expanded": lambda x: x[:, :1].expand_as(x),
    "narrowed": lambda x: x[:, 1:],
    "cut short": lambda x: x[..., :6],
    "of one row, strides of another": lambda x: x[:, :1].transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.in_pairs
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_linear_of_every_layout(layout: str, bias: bool, first: bool) -> None:
    change = LAYOUTS[layout]
    width = 6 if layout in ("sliced", "cut short") else 12
    head: list[nn.Module] = [] if first else [nn.Linear(12, 12)]
    tail = nn.Linear(width, 5, bias=bias)
    layers = [
        *head,
        Own(lambda s, x: s.part(change(x)), part=tail),
        Own(lambda s, x: change(x) if width == 12 else x),
        nn.Tanh(),
    ]
    loss = lambda outputs, _: outputs.sum()  # noqa: E731  its gradient is an expanded tensor
    assert_same_as_plain(layers, torch.randn(6, 5, 12), cuts=(1,) if first else (1, 2), loss=loss, microbatches=2)


def test_the_gradient_of_a_sum_is_an_expanded_tensor() -> None:
    for bias in (True, False):
        for shape in ((6, 12), (6, 4, 12)):
            layers = [nn.Linear(12, 12, bias=bias), nn.Linear(12, 12, bias=bias)]
            assert_same_as_plain(layers, torch.randn(shape), loss=lambda outputs, _: outputs.sum())


def test_a_transposed_weight_keeps_its_layout() -> None:
    layers = [nn.Linear(12, 9), nn.Linear(9, 12)]
    for layer in layers:
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    assert_same_as_plain(layers, torch.randn(6, 12))
    assert_same_as_plain(layers, torch.randn(6, 3, 12))


@pytest.mark.parametrize("rows", [1, 2])
def test_weights_with_a_single_row_or_column(rows: int) -> None:
    layers = [nn.Linear(12, rows), nn.Linear(rows, 1), nn.Linear(1, 5)]
    assert_same_as_plain(layers, torch.randn(6, 12), cuts=(1,))


def test_matmul_mm_and_addmm_with_a_parameter() -> None:
    def w(turned: bool = False) -> nn.Parameter:
        values = torch.randn(8, 8) / 3
        return nn.Parameter(values.t() if turned else values)

    layers = [
        Own(lambda s, x: x @ s.w, w=w()),
        Own(lambda s, x: torch.tanh(torch.matmul(x, s.w)), w=w(turned=True)),
        Own(lambda s, x: x.mm(s.w), w=w()),
        Own(lambda s, x: torch.addmm(s.b, x, s.w), w=w(), b=nn.Parameter(torch.randn(8))),
        Own(lambda s, x: torch.mm(s.w, x.t()).t(), w=w()),
        Own(lambda s, x: F.linear(input=x, weight=s.w), w=w()),
    ]
    assert_same_as_plain(layers, torch.randn(6, 8), cuts=(1, 3))
    assert_same_as_plain(layers[:2], torch.randn(6, 3, 8))
    assert_same_as_plain(layers[:2], torch.randn(6, 3, 8).transpose(1, 2).contiguous().transpose(1, 2))


CONVOLUTIONS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Conv1d(4, 6, 3, padding=1), (5, 4, 9)),
    (nn.Conv2d(4, 6, 3, stride=2, bias=False), (5, 4, 9, 9)),
    (nn.Conv2d(4, 6, 3, padding="same", groups=2), (5, 4, 8, 8)),
    (nn.Conv2d(4, 6, 4, padding="same"), (5, 4, 8, 8)),
    (nn.Conv2d(4, 6, 3, padding="valid", dilation=2), (5, 4, 8, 8)),
    (nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (5, 4, 8, 8)),
    (nn.Conv3d(4, 6, 3), (5, 4, 5, 5, 5)),
    (nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), (5, 4, 9)),
    (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, dilation=2), (5, 4, 6, 6)),
]


@pytest.mark.parametrize(("layer", "shape"), CONVOLUTIONS, ids=str)
def test_convolutions(layer: nn.Module, shape: tuple[int, ...]) -> None:
    first = {3: nn.Conv1d(4, 4, 1), 4: nn.Conv2d(4, 4, 1), 5: nn.Conv3d(4, 4, 1)}[len(shape)]
    assert_same_as_plain([first, nn.ReLU(inplace=True), layer], torch.randn(shape), cuts=(1,))
    assert_same_as_plain([layer, nn.ReLU(inplace=True)], torch.randn(shape))


@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 2}, {"padding_idx": -3}, {"scale_grad_by_freq": True}, {"max_norm": 1.0}]
)
def test_embeddings(options: dict[str, Any]) -> None:
    layers = [nn.Embedding(9, 8, **options), nn.Linear(8, 8)]
    assert_same_as_plain(layers, torch.randint(9, (6, 7)), cuts=(1,))


def test_looking_at_a_weight_is_no_use_of_it() -> None:
    linear = nn.Linear(8, 8)

    def look(part: Any, x: Tensor) -> Any:
        assert part.weight.detach().norm() > 0
        return part(x.to(part.weight.dtype).reshape(-1, part.weight.shape[1]))

    assert_same_as_plain([Do(look, linear)], torch.randn(6, 8))


def test_tied_embedding_and_head_in_one_stage() -> None:
    embedding, head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
    head.weight = embedding.weight
    layers = [embedding, nn.Linear(8, 8), nn.Tanh(), head]
    loss = lambda outputs, target: F.cross_entropy(outputs.flatten(0, 1), target.flatten())  # noqa: E731
    assert_same_as_plain(layers, torch.randint(11, (6, 5)), torch.randint(11, (6, 5)), loss=loss)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("remat", ["none", "stage", "layer"])
def test_autocast(cache: bool, remat: str) -> None:
    twice = Do(lambda part, norm, x: part(torch.tanh(part(x)) + norm(x)), nn.Linear(8, 8), nn.LayerNorm(8))
    parts = (nn.Linear(8, 8) for _ in range(3))
    three = Do(lambda q, k, v, x: F.scaled_dot_product_attention(q(x), k(x), v(x)), *parts)
    product = Own(lambda s, x: x @ s.w, w=nn.Parameter(torch.randn(8, 8)))
    layers = [nn.Embedding(9, 8), nn.Linear(8, 8), twice, three, product, nn.Linear(8, 9)]
    context = lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache)  # noqa: E731
    modes = ((False, remat), (True, remat))
    for cuts in ((), (1, 3), (2, 4)):
        assert_same_as_plain(layers, torch.randint(9, (6, 5)), cuts=cuts, context=context, modes=modes)


def test_a_layer_that_takes_gradients_in_its_forward() -> None:
    def penalty(part: Any, x: Tensor) -> Any:
        x = x if x.requires_grad else x.detach().requires_grad_()
        y = torch.tanh(part(x))
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope.square()

    assert_same_as_plain([nn.Linear(8, 8), Do(penalty, nn.Linear(8, 8)), nn.Linear(8, 8)], torch.randn(6, 8), cuts=(1,))


def test_a_forward_put_in_place_of_a_modules_own() -> None:
    class Wrapped:
        def __init__(self, module: nn.Linear) -> None:
            self.module = module

        def __call__(self, x: Tensor) -> Tensor:
            return F.linear(x, self.module.weight) * 2

    linear = nn.Linear(8, 8)
    linear.__dict__["forward"] = Wrapped(linear)
    assert_same_as_plain([nn.Linear(8, 8), linear], torch.randn(6, 8))


def test_frozen_attention_in_eval_mode_takes_torchs_fast_path() -> None:
    """It asks whether somebody sees torch's functions, and took the slow one: last bits, 2e-3 under autocast."""
    parts = nn.TransformerEncoderLayer(12, 2, 16, batch_first=True), nn.MultiheadAttention(12, 2, batch_first=True)
    for part in parts:
        part.eval().requires_grad_(False)
    encoder = nn.TransformerEncoder(parts[0], 2)
    layers = [encoder, Do(lambda x: parts[1](x, x, x, need_weights=False)[0]), nn.Linear(12, 12)]
    assert_same_as_plain(layers, torch.randn(6, 5, 12), cuts=(1,), loss=mean_square)


def test_vmap_inside_a_layer() -> None:
    layers = [nn.Linear(8, 8), Do(lambda part, x: torch.vmap(part)(x), nn.Linear(8, 8)), nn.Linear(8, 8)]
    assert_same_as_plain(layers, torch.randn(6, 8))


class Waits(torch.autograd.Function):
    """Uses the gradient when the next stage has gone on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(0.01)
        return grad * 1.0


VIEWED: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "unsqueezed": ((3, 6), lambda table: table.unsqueeze(0)),
    "viewed": ((18,), lambda table: table.view(1, 3, 6)),
    "transposed": ((6, 3), lambda table: table.t()[None]),
    "reshaped after a view": ((3, 6), lambda table: table.view(18).reshape(1, 3, 6)),
    "as it is": ((1, 3, 6), lambda table: table),
}


@pytest.mark.parametrize("remat", ["none", "stage"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("view", VIEWED)
def test_a_gradient_on_its_way_does_not_change_with_one_that_is_a_view_of_it(
    view: str, schedule: str, remat: Literal["none", "stage"]
) -> None:
    """For one sample a table's gradient is a view of the one that goes to the stage before, and so was its .grad."""
    shape, seen = VIEWED[view]
    model = nn.Sequential(
        Do(lambda part, x: Waits.apply(part(x)), nn.Linear(6, 6)),  # type: ignore[no-untyped-call]
        Own(lambda m, x: m.part(x + seen(m.table)), table=nn.Parameter(torch.randn(shape)), part=nn.Linear(6, 6)),
    )
    plain, x, y = copy.deepcopy(model), torch.randn(6, 3, 6), torch.randn(6, 3, 6)
    options: dict[str, Any] = {"schedule": schedule, "remat": remat, "partition": [1, 1], "loss": F.mse_loss}
    with gapless.Pipeline(model, devices=2, microbatches=6, **options) as pipe:
        pipe.step(x, y)
    for part, goal in zip(x.split(1), y.split(1), strict=True):
        (F.mse_loss(plain(part), goal) / 6).backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None, name
        assert other.grad is not None, name
        assert torch.equal(one.grad, other.grad), name


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("traced", [False, True])
def test_neither_does_it_in_a_stream(traced: bool, microbatches: int) -> None:
    """Clipping and later microbatches changed it."""

    def trained(seen: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(1)
        layers = [
            Do(lambda part, x: Waits.apply(part(x)), nn.Linear(6, 6)),  # type: ignore[no-untyped-call]
            Own(lambda m, x: m.part(x + seen(m.table)), table=nn.Parameter(torch.ones(3, 6)), part=nn.Linear(6, 6)),
        ]
        model: Any = Do(lambda first, second, x: second(first(x).tanh()), *layers) if traced else layers
        batches = [(torch.randn(microbatches, 3, 6), torch.randn(microbatches, 3, 6)) for _ in range(6)]
        options: dict[str, Any] = {"schedule": "2bw" if microbatches > 1 else "pipedream", "loss": F.mse_loss}
        if traced:
            options["example"] = batches[0][0]
        with (
            gapless.Pipeline(model, devices=2, microbatches=microbatches, **options) as pipe,
            pipe.stream(optimizer=functools.partial(torch.optim.SGD, lr=0.1), clip=0.01) as stream,
        ):
            losses = [each.loss for each in stream.run(batches)]
        return [*losses, *(each.detach() for layer in layers for each in layer.parameters())]

    for one, other in zip(trained(lambda table: table.unsqueeze(0)), trained(lambda table: table * 1.0), strict=True):
        assert torch.equal(one, other)
