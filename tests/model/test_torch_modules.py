"""Every module of torch.nn inside a traced model: losses and gradients are those of a loop of the test's own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.errors import ConfigError
from tests.by_hand import seeded_loop

SEED, SIZE, MICROBATCHES = 3, 8, 3
Use = Callable[[Any, Tensor], Tensor]


class Around(nn.Module):
    """A module between two linear layers, used in a way of its own."""

    def __init__(self, module: nn.Module, use: Use) -> None:
        super().__init__()
        self.first, self.module, self.last, self.use = nn.Linear(6, 6), module, nn.LazyLinear(6), use

    def forward(self, x: Tensor) -> Any:
        return self.last(self.use(self.module, self.first(x)).flatten(1))


def differs(module: nn.Module, use: Use, schedule: str = "1f1b", remat: Any = "none", steps: int = 1) -> list[str]:
    """Where a pipeline and the plain loop do, in bits. The module draws at most once in a forward."""
    torch.manual_seed(0)
    x, y = torch.randn(SIZE, 6), torch.randn(SIZE, 6)
    model = Around(module, use)
    with torch.no_grad():
        model.eval()(x)
    plain = copy.deepcopy(model.train())
    losses: list[Tensor] = []
    with gapless.Pipeline(
        model,
        devices=2,
        schedule=schedule,
        remat=remat,
        microbatches=MICROBATCHES,
        loss=F.mse_loss,
        seed=SEED,
        intra_op_threads=1,
    ) as pipe:
        for _ in range(steps):
            losses += pipe.step(x, y).losses
    expected: list[Tensor] = []
    for step in range(steps):
        expected += seeded_loop([plain], x, y, microbatches=MICROBATCHES, seed=SEED, step=step)
    found = [f"loss {n}" for n, (ours, other) in enumerate(zip(losses, expected, strict=True)) if ours != other]
    for (name, ours), other in zip(model.state_dict(keep_vars=True).items(), plain.state_dict().values(), strict=True):
        if not torch.equal(ours, other):
            found.append(name)
    for (name, one), two in zip(model.named_parameters(), plain.parameters(), strict=True):
        if (one.grad is None) != (two.grad is None) or (one.grad is not None and not torch.equal(one.grad, two.grad)):  # type: ignore[arg-type]
            found.append(f"{name}.grad")
    if not torch.equal(model.eval()(x), plain.eval()(x)):
        found.append("a plain call after the pipeline")
    return found


def over_time(module: Any, x: Tensor) -> Any:
    return module(x.view(-1, 3, 2))[0]


def time_first(module: Any, x: Tensor) -> Tensor:
    out: Tensor = module(x.view(-1, 3, 2).transpose(0, 1))[0]
    return out.transpose(0, 1)


class Own(nn.LSTM):
    """A user's, that inherits what torch keeps there."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x)


@pytest.mark.parametrize(
    ("make", "use", "schedule", "remat"),
    [
        (lambda: nn.LSTM(2, 3, batch_first=True), over_time, "zb-h1", "none"),
        (lambda: nn.LSTM(2, 3, 2, bidirectional=True, dropout=0.5), time_first, "zb-v", "stage"),
        (lambda: nn.GRU(2, 3, 2, batch_first=True, bidirectional=True), over_time, "1f1b", "none"),
        (lambda: nn.GRU(2, 3, 2, dropout=0.5), time_first, "zb-h1", "none"),
        (lambda: nn.RNN(2, 3, batch_first=True), over_time, "zb-v", "stage"),
        (lambda: Own(2, 3, batch_first=True), over_time, "zb-v", "stage"),
    ],
    ids=["LSTM", "deep LSTM", "GRU", "deep GRU", "RNN", "own LSTM"],
)
def test_recurrent_layers_train_as_in_the_plain_loop(
    make: Callable[[], nn.Module], use: Use, schedule: str, remat: Any
) -> None:
    """What an LSTM keeps of its parameters was taken for state of the user's, and every such model was refused."""
    assert differs(make(), use, schedule, remat, steps=2) == []


def plain(module: Any, x: Tensor) -> Any:
    out = module(x)
    return out[0] if isinstance(out, tuple) else out


def shaped(*shape: int) -> Use:
    return lambda module, x: plain(module, x.repeat(1, -(-torch.Size(shape).numel() // 6)).view(-1, *shape))


def twice(module: Any, x: Tensor) -> Any:
    return plain(lambda x: module(x, x.cos()), x.view(-1, 3, 2))


def added(module: Any, x: Tensor) -> Any:
    return x + plain(module, (x.detach() * 3).abs().long() % 5).flatten(1)[:, :6]


_IMAGES = {1: shaped(2, 3), 2: shaped(2, 3, 3), 3: shaped(2, 3, 3, 3)}
_LEFT_OUT = [
    "Module",
    "Container",
    "ModuleList",
    "ModuleDict",
    "ParameterList",
    "ParameterDict",
    "RNNBase",
    "RNNCellBase",
    "DataParallel",
    "SyncBatchNorm",
    "MaxUnpool1d",
    "MaxUnpool2d",
    "MaxUnpool3d",
    "FractionalMaxPool3d",
    "LinearCrossEntropyLoss",
]
_ATTENTION: dict[str, Any] = {"batch_first": True, "dropout": 0.0}
_OTHERS: dict[str, tuple[Callable[[], nn.Module], Use]] = {
    "AdaptiveLogSoftmaxWithLoss": (
        lambda: nn.AdaptiveLogSoftmaxWithLoss(6, 9, [3, 5]),
        lambda module, x: module.log_prob(x),
    ),
    "Bilinear": (lambda: nn.Bilinear(2, 2, 2), twice),
    "ChannelShuffle": (lambda: nn.ChannelShuffle(2), shaped(2, 3)),
    "CosineSimilarity": (nn.CosineSimilarity, twice),
    "CrossMapLRN2d": (lambda: nn.CrossMapLRN2d(2), shaped(3, 2, 1)),
    "Embedding": (lambda: nn.Embedding(5, 6), added),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(5, 6), added),
    "Fold": (lambda: nn.Fold((2, 3), (1, 1)), shaped(1, 6)),
    "FractionalMaxPool2d": (lambda: nn.FractionalMaxPool2d(2, 2), shaped(2, 3, 3)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), plain),
    "LayerNorm": (lambda: nn.LayerNorm(6), plain),
    "Linear": (lambda: nn.Linear(6, 6), plain),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), shaped(3, 2)),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(2, 1, batch_first=True),
        lambda module, x: module(*(x.view(-1, 3, 2),) * 3)[0],
    ),
    "PairwiseDistance": (nn.PairwiseDistance, twice),
    "PixelShuffle": (lambda: nn.PixelShuffle(1), shaped(1, 2, 3)),
    "PixelUnshuffle": (lambda: nn.PixelUnshuffle(1), shaped(1, 2, 3)),
    "RMSNorm": (lambda: nn.RMSNorm(6), plain),
    "Sequential": (lambda: nn.Sequential(nn.Linear(6, 6)), plain),
    "Softmax2d": (nn.Softmax2d, shaped(1, 2, 3)),
    "Threshold": (lambda: nn.Threshold(0.1, 0.2), plain),
    "Transformer": (lambda: nn.Transformer(2, 1, 1, 1, 4, **_ATTENTION), twice),
    "TransformerDecoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(2, 1, 4, **_ATTENTION), 2),
        twice,
    ),
    "TransformerDecoderLayer": (lambda: nn.TransformerDecoderLayer(2, 1, 4, **_ATTENTION), twice),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(2, 1, 4, **_ATTENTION), 2),
        shaped(3, 2),
    ),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(2, 1, 4, **_ATTENTION), shaped(3, 2)),
    "Unflatten": (lambda: nn.Unflatten(1, (2, 3)), plain),
    "Unfold": (lambda: nn.Unfold((1, 1)), shaped(1, 2, 3)),
    "Upsample": (lambda: nn.Upsample(scale_factor=2), shaped(3, 2)),
    "UpsamplingBilinear2d": (lambda: nn.UpsamplingBilinear2d(scale_factor=2), shaped(1, 3, 2)),
    "UpsamplingNearest2d": (lambda: nn.UpsamplingNearest2d(scale_factor=2), shaped(1, 3, 2)),
}
_ARGUMENTS = {"Cell": (6, 6), "Conv": (2, 2, 2), "Norm": (2,), "LPPool": (2, 2), "Pool": (2,), "Constant": (1, 0.5)}
_NAMES = [
    name
    for name, kind in sorted(vars(nn).items())
    if isinstance(kind, type) and issubclass(kind, nn.Module) and name not in (*_LEFT_OUT, "LSTM", "GRU", "RNN")
    if not name.startswith("Lazy") and "Loss" not in name.removesuffix("WithLoss")
]


def case_of(name: str) -> tuple[nn.Module, Use]:
    if name in _OTHERS:
        make, use = _OTHERS[name]
        return make(), use
    kind = getattr(nn, name)
    arguments = next((each for part, each in _ARGUMENTS.items() if part in name), (1,) if "Pad" in name else ())
    dims = next((int(each) for each in "123" if name.endswith(f"{each}d")), None)
    return kind(*arguments), plain if dims is None else _IMAGES[dims]


@pytest.mark.slow
@pytest.mark.parametrize("name", _NAMES)
def test_modules_of_torch_train_as_in_the_plain_loop(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert differs(*case_of(name)) == []


class Holding(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.linear, self.part = nn.Linear(6, 6), part

    def forward(self, x: Tensor) -> Any:
        return self.part(self.linear(x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("place", "name"),
    [(lambda part: [part, nn.Tanh()], "0"), (lambda part: [Holding(part), nn.Tanh()], r"0\.part"), (Holding, "part")],
    ids=["a layer", "in a layer", "in a traced model"],
)
def test_a_scripted_module_is_refused_with_the_way_out(place: Callable[[Any], Any], name: str) -> None:
    """It failed with whatever words of torch came first."""
    scripted = torch.jit.script(nn.Linear(6, 6))
    message = (
        rf"^{name} is a module that torch\.jit has compiled, .*: use the module as it was before torch\.jit\.script"
    )
    with pytest.raises(ConfigError, match=message):
        gapless.Pipeline(place(scripted), devices=2, microbatches=2, loss=F.mse_loss)
