"""The norm of all gradients is that of torch's own function on the model in one piece, wherever its parts are."""

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

import gapless
from tests.pipelines import Do, assert_same
from tests.run.forked import Launch
from tests.run.ranks.watch.test_watch import pipeline

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128]


def mixed(dtype: torch.dtype) -> nn.Module:
    """Weights of a dtype of its own, between inputs and outputs of float32."""
    return Do(lambda layer, x: layer(x.to(layer.weight.dtype)).real.float(), nn.Linear(6, 6, dtype=dtype))


def layers_of(seed: int) -> tuple[list[nn.Module], float]:
    torch.manual_seed(seed)
    chance = random.Random(seed)
    return [mixed(chance.choice(DTYPES)) for _ in range(4)], chance.choice([2.0, 1.0, 3.0, float("inf")])


def batch() -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(0)
    return torch.randn(16, 6, generator=chance), torch.randn(16, 6, generator=chance)


def clips(make: Callable[[list[nn.Module]], gapless.Pipeline] = pipeline) -> None:
    for seed in range(16):
        layers, norm_type = layers_of(seed)
        plain = nn.Sequential(*layers_of(seed)[0])
        gapless.plain_step(list(plain), *batch(), loss=nn.functional.mse_loss, microbatches=4)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.05, norm_type)
        with make(layers) as pipe:
            pipe.step(*batch())
            assert_same(pipe.clip_grad_norm_(0.05, norm_type), expected, f"norm, seed {seed}")
            theirs = dict(plain.named_parameters())
            for name, ours in pipe.named_parameters():
                assert_same(ours.grad, theirs[name].grad, f"{name}, seed {seed}")


def test_gradients_of_several_dtypes_are_clipped_as_torch_does(launch: Launch) -> None:
    """Every norm was turned to the dtype of the first one before they were added."""
    launch(clips, 2)


def test_so_are_those_of_threads() -> None:
    clips(lambda layers: gapless.Pipeline(layers, devices=2, loss=nn.functional.mse_loss, microbatches=4))
