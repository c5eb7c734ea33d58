"""Modules that look like something known and do something else: what counts is what calling them does."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import gapless
from gapless.errors import ConfigError, PartitionError
from tests.by_hand import assert_same_bits, in_order, loop, same, seeded_loop


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        return x + super().forward(x)  # type: ignore[no-untyped-call]


class Doubling(nn.Sequential):
    def __call__(self, x: Tensor) -> Any:
        return 2 * super().__call__(x)


class Backwards(nn.Sequential):
    """The forward is torch's, which goes by `__iter__`."""

    def __iter__(self) -> Iterator[nn.Module]:
        return reversed(list(super().__iter__()))


class Dense(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = torch.tanh(x + layer(x))
        return x


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


class Called(nn.Linear):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) * 0.5


class SkipNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class SkipEmbedding(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.argmax(-1)) + x


class SkipAttention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        out, _ = super().forward(x[:, None], x[:, None], x[:, None])
        return x + out[:, 0]


def _double(_: nn.Module, grads: Any) -> Any:
    return tuple(grad * 2 for grad in grads)


def _layers() -> list[nn.Module]:
    return [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]


def _with_pre_hook() -> nn.Module:
    model = nn.Sequential(*_layers())
    model.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    return model


def _with_hook() -> nn.Module:
    model = nn.Sequential(*_layers())
    model.register_forward_hook(lambda _, args, out: out * args[0])
    return model


def _triple(self: nn.Sequential, x: Tensor) -> Any:
    return 3 * nn.Sequential.forward(self, x)  # type: ignore[no-untyped-call]


class Patched(nn.Sequential):
    """Its forward is an instance's, as some libraries do it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.forward = functools.partial(_triple, self)  # type: ignore[method-assign]

    def __deepcopy__(self, memo: Any) -> Patched:
        return Patched(*(copy.deepcopy(layer, memo) for layer in self))


ROOTS: dict[str, Callable[[], nn.Module]] = {
    "forward": lambda: Residual(*_layers()),
    "call": lambda: Doubling(*_layers()),
    "iter": lambda: Backwards(*_layers()),
    "list with a forward": lambda: Dense(_layers()),
    "forward of the instance": lambda: Patched(*_layers()),
    "pre hook": _with_pre_hook,
    "hook": _with_hook,
}


@pytest.mark.parametrize("root", ROOTS)
def test_a_sequential_that_does_more_than_call_its_layers_is_called_as_it_is(root: str) -> None:
    """It was taken apart: the residual of a Sequential's own forward was gone from pipeline and plain_step alike."""
    model = ROOTS[root]()
    plain, reference = copy.deepcopy(model), copy.deepcopy(model)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss, schedule="zb-h1") as pipe:
        for _ in range(2):
            assert same(pipe.step(x, y).loss, loop(plain, x, y))
            gapless.plain_step(reference, x, y, loss=F.mse_loss, microbatches=4)
            assert_same_bits(model, plain, root)
            assert_same_bits(reference, plain, f"plain_step, {root}")
        outputs = pipe.evaluate(x).outputs
    with torch.no_grad():
        assert torch.equal(outputs, torch.cat([plain.eval()(part) for part in x.tensor_split(4)]))


def test_a_sequential_whose_backward_hook_a_trace_would_lose_is_refused() -> None:
    """It was dropped without a word: the hook changed nothing."""
    model = nn.Sequential(*_layers())
    model.register_full_backward_pre_hook(_double)
    with (
        gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss) as pipe,
        pytest.raises(PartitionError, match="can't trace Sequential: a backward hook of a module"),
    ):
        pipe.step(torch.randn(8, 4), torch.randn(8, 4))


def test_hooks_for_all_modules_are_refused_for_a_model_that_is_never_called_as_a_whole() -> None:
    """They saw the layers of a Sequential but never itself, and of a traced model the pipeline's own parts."""
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    layers = _layers()
    plain = copy.deepcopy(layers)
    for model in (nn.Sequential(*_layers()), Residual(*_layers()), layers):
        with gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss) as pipe:
            handle = nn.modules.module.register_module_forward_hook(lambda _, args, out: out * 0.5)
            try:
                if model is layers:
                    assert same(pipe.step(x, y).loss, loop(in_order(plain), x, y))
                    continue
                for call in (pipe.step, pipe.evaluate):
                    with pytest.raises(ConfigError, match=r"would never see this \w+, as a pipeline"):
                        call(x, y)
                with pytest.raises(ConfigError, match=r"would never see this \w+, as a pipeline"):
                    gapless.plain_step(model, x, y, loss=F.mse_loss, microbatches=4)
            finally:
                handle.remove()
    assert_same_bits(nn.ModuleList(layers), nn.ModuleList(plain))


def test_a_partition_of_a_sequential_that_is_traced_is_refused_with_the_reason() -> None:
    with pytest.raises(PartitionError, match="this Residual, which has a forward of its own, is traced"):
        gapless.Pipeline(Residual(*_layers()), devices=2, microbatches=4, loss=F.mse_loss, partition=[2, 3])


def _normed(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(norm(nn.Linear(4, 4)), nn.Tanh(), norm(nn.Linear(4, 4)), norm(nn.Linear(4, 4)))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(Scaled(4, 4), nn.Tanh(), Scaled(4, 4), nn.Linear(4, 4)),
    "call": lambda: nn.Sequential(Called(4, 4), nn.Tanh(), Called(4, 4), nn.Linear(4, 4)),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), SkipNorm(4), nn.Linear(4, 4), SkipNorm(4)),
    "embedding": lambda: nn.Sequential(nn.Linear(4, 4), SkipEmbedding(4, 4), nn.Linear(4, 4), SkipEmbedding(4, 4)),
    "attention": lambda: nn.Sequential(nn.Linear(4, 4), SkipAttention(4, 2), nn.Linear(4, 4), SkipAttention(4, 2)),
    "nested": lambda: nn.Sequential(Residual(*_layers()), nn.Tanh(), Dense(_layers()), Doubling(nn.Linear(4, 4))),
    "spectral norm": lambda: _normed(parametrizations.spectral_norm),
    "spectral norm by hooks": lambda: _normed(nn.utils.spectral_norm),
    "weight norm": lambda: _normed(parametrizations.weight_norm),
}


@pytest.mark.in_pairs
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("remat", ["none", "stage"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_that_is_almost_one_of_torchs_is_called_as_it_is(layer: str, remat: Any, schedule: str) -> None:
    model = LAYERS[layer]()
    plain = copy.deepcopy(model)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss, schedule=schedule, remat=remat) as pipe:
        for _ in range(2):
            assert same(pipe.step(x, y).loss, loop(plain, x, y))
    assert_same_bits(model, plain, layer)


def test_a_forward_put_into_torchs_own_class_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler for linear layers answered in its place where the backward is split."""
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x) * 0.5)
    torch.manual_seed(0)
    model = nn.Sequential(*_layers())
    plain = copy.deepcopy(model)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss, schedule="zb-h1") as pipe:
        assert same(pipe.step(x, y).loss, loop(plain, x, y))
    assert_same_bits(model, plain)


def test_a_function_that_bears_the_name_of_one_of_torchs_draws_from_its_seed() -> None:
    """functools.wraps gave it torch's name, so it ran outside the mode and drew from the generator of all threads."""

    @functools.wraps(F.relu)
    def noisy(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)

    torch.manual_seed(0)
    layers: list[Any] = [nn.Linear(4, 4), noisy, nn.Linear(4, 4), noisy]
    plain = copy.deepcopy(layers)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with gapless.Pipeline(layers, devices=2, microbatches=4, loss=F.mse_loss, seed=3) as pipe:
        pipe.step(x, y)
    seeded_loop(plain, x, y, seed=3)
    for number in (0, 2):
        assert torch.equal(layers[number].weight.grad, plain[number].weight.grad)
