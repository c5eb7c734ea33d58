"""Batch norm in microbatches: what its running statistics become, and that nothing counts twice."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gapless
from gapless.errors import ConfigError
from tests.by_hand import loop
from tests.pipelines import Do, assert_same, assert_same_gradients

SEED = 3


def normed(width: int = 6, momentum: float | None = 0.1, affine: bool = True, track: bool = True) -> nn.Sequential:
    def norm() -> nn.Module:
        return nn.BatchNorm1d(width, momentum=momentum, affine=affine, track_running_stats=track)

    blocks = [
        nn.Sequential(nn.Linear(width, width), norm(), nn.ReLU()),
        norm(),
        nn.Linear(width, width),
        nn.Sequential(nn.Dropout(0.2), norm(), nn.Linear(width, width)),
        nn.Tanh(),
        norm(),
    ]
    return nn.Sequential(*blocks)


def buffers_of(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def batch(samples: int = 14, width: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, width), torch.randn(samples, width)


def assert_exact(
    model: nn.Sequential, *, batchnorm: Any, microbatches: int = 4, steps: int = 3, **options: Any
) -> None:
    """Losses, outputs, gradients and buffers are those of the plain loop, over steps with an optimizer."""
    reference = copy.deepcopy(model)
    asked: dict[str, Any] = {"loss": F.mse_loss, "microbatches": microbatches, "seed": SEED, "batchnorm": batchnorm}
    with gapless.Pipeline(model, **asked, **options) as pipe:
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
        for step in range(steps):
            x, y = batch()
            ours = pipe.step(x, y, outputs=True)
            plain = gapless.plain_step([*reference], x, y, step=step, **asked)
            assert_same(ours.outputs, plain.outputs, f"step {step}")
            assert_same_gradients(model, reference, f"step {step}")
            assert_same(buffers_of(model), buffers_of(reference), f"step {step}, buffers")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            before = buffers_of(model)
            pipe.evaluate(x, y)
            assert_same(buffers_of(model), before, "evaluate counts")


@pytest.mark.in_pairs
@pytest.mark.parametrize("batchnorm", ["deferred", "microbatch"])
@pytest.mark.parametrize("remat", ["none", "stage", "layer"])
@pytest.mark.parametrize(("schedule", "devices"), [("gpipe", 3), ("1f1b", 2), ("interleaved", 2), ("zb-v", 2)])
def test_buffers_and_gradients_are_those_of_the_plain_loop(
    schedule: str, devices: int, remat: Any, batchnorm: str
) -> None:
    assert_exact(normed(), schedule=schedule, devices=devices, remat=remat, batchnorm=batchnorm)


@pytest.mark.in_pairs
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("remat", ["none", "layer"])
def test_every_kind_of_batch_norm_is_exact_when_deferred(remat: Any, momentum: float | None, affine: bool) -> None:
    model = normed(momentum=momentum, affine=affine)
    assert_exact(model, batchnorm="deferred", devices=2, schedule="zb-h1", remat=remat)


@pytest.mark.parametrize("momentum", [0.1, 0.3, None])
@pytest.mark.parametrize("microbatches", [1, 3, 5])
def test_deferred_statistics_are_those_of_one_update_with_the_whole_minibatch(
    microbatches: int, momentum: float | None
) -> None:
    norm = nn.BatchNorm2d(3, momentum=momentum).double()
    whole = copy.deepcopy(norm)
    model = nn.Sequential(norm, nn.Conv2d(3, 2, 1).double())
    with gapless.Pipeline(
        model, devices=2, microbatches=microbatches, loss=F.mse_loss, batchnorm="deferred", remat="stage"
    ) as pipe:
        for _ in range(3):
            x = torch.randn(13, 3, 4, 5, dtype=torch.float64) * 3 + 50  # 13: no number of microbatches divides it
            pipe.step(x, torch.zeros(13, 2, 4, 5, dtype=torch.float64))
            whole(x)
            assert norm.running_mean is not None and whole.running_mean is not None  # noqa: PT018
            assert norm.running_var is not None and whole.running_var is not None  # noqa: PT018
            assert (norm.running_mean - whole.running_mean).abs().max() < 1e-12
            assert (norm.running_var - whole.running_var).abs().max() < 1e-12
            assert torch.equal(norm.num_batches_tracked, whole.num_batches_tracked)  # type: ignore[arg-type]


def test_the_statistics_of_microbatches_are_torchs_own() -> None:
    norm = nn.BatchNorm1d(6)
    plain = copy.deepcopy(norm)
    x, y = batch(12)
    with gapless.Pipeline([norm, nn.Linear(6, 6)], devices=2, microbatches=3, loss=F.mse_loss, remat="stage") as pipe:
        pipe.step(x, y)
    for part in x.tensor_split(3):
        plain(part)
    assert_same(buffers_of(norm), buffers_of(plain), "buffers")
    assert int(norm.num_batches_tracked) == 3  # type: ignore[arg-type]


def test_a_batch_norm_without_statistics_has_none_to_move() -> None:
    model = normed(track=False)
    assert_exact(model, batchnorm="deferred", devices=2, schedule="1f1b", remat="stage")
    assert not buffers_of(model)


def test_a_batch_norm_in_eval_mode_keeps_its_statistics() -> None:
    model = normed()
    model[1].eval()
    before = buffers_of(model[1])
    assert_exact(model, batchnorm="deferred", devices=2, schedule="zb-h1", remat="layer")
    assert_same(buffers_of(model[1]), before, "frozen")


def test_a_batch_norm_that_is_used_twice_moves_twice_for_a_minibatch() -> None:
    norm, linear = nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 6)
    model = nn.Sequential(Do(lambda norm, linear, x: norm(linear(norm(x) + 1)), norm, linear), nn.Linear(6, 6))
    assert_exact(copy.deepcopy(model), batchnorm="deferred", devices=2, schedule="1f1b", remat="stage")
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss, batchnorm="deferred") as pipe:
        pipe.step(*batch())
    assert int(norm.num_batches_tracked) == 2  # type: ignore[arg-type]


def test_a_forward_that_starts_again_counts_once() -> None:
    # The weight is deferred by F.linear and then used bare, so that the first forward learns of it too late.

    def forward(linear: nn.Linear, norm: nn.Module, x: Tensor) -> Tensor:
        return norm(linear(x)) * linear.weight.sum()  # type: ignore[no-any-return]

    for batchnorm in ("deferred", "microbatch"):
        model = nn.Sequential(*(Do(forward, nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2)))
        assert_exact(model, batchnorm=batchnorm, devices=2, schedule="zb-h1")


def test_a_layer_that_changes_its_input_counts_once() -> None:

    def forward(norm: nn.Module, x: Tensor) -> Tensor:
        return norm(x.clone()) + x.mul_(2)  # type: ignore[no-any-return]

    model = nn.Sequential(nn.Linear(6, 6), Do(forward, nn.BatchNorm1d(6)), Do(forward, nn.BatchNorm1d(6)))
    assert_exact(model, batchnorm="deferred", devices=2, schedule="1f1b", partition=[1, 2])


def test_a_step_that_fails_leaves_no_trace_in_deferred_statistics() -> None:
    broken = [True]

    def maybe(x: Tensor) -> Tensor:
        if broken[0]:
            raise RuntimeError("on purpose")
        return x

    norm = nn.BatchNorm1d(6)
    before = buffers_of(norm)
    model: list[Any] = [norm, nn.Linear(6, 6), maybe]
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss, batchnorm="deferred") as pipe:
        with pytest.raises(RuntimeError, match="on purpose"):
            pipe.step(*batch())
        assert_same(buffers_of(norm), before, "buffers")
        broken[0] = False
        pipe.step(*batch())
    assert int(norm.num_batches_tracked) == 1  # type: ignore[arg-type]


def test_batch_norm_in_training_can_be_refused() -> None:
    model = normed()
    with gapless.Pipeline(model, devices=2, microbatches=2, loss=F.mse_loss, batchnorm="error") as pipe:
        with pytest.raises(ConfigError, match=r"a BatchNorm1d in training .* batchnorm='error' forbids"):
            pipe.step(*batch())
        pipe.evaluate(*batch())
        pipe.eval()
        pipe.step(*batch())
    functional: list[Any] = [lambda x: F.batch_norm(x, None, None, training=True), nn.Linear(6, 6)]
    with (
        gapless.Pipeline(functional, devices=2, microbatches=2, loss=F.mse_loss, batchnorm="error") as pipe,
        pytest.raises(ConfigError, match="a batch_norm in training"),
    ):
        pipe.step(*batch())


def test_what_cannot_be_deferred_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.SyncBatchNorm(6))
    with pytest.raises(ConfigError, match="a SyncBatchNorm updates its statistics with other processes"):
        gapless.Pipeline(model, devices=2, microbatches=2, loss=F.mse_loss, batchnorm="deferred")
    with pytest.raises(ConfigError, match="batchnorm is 'later', but it must be 'deferred', 'microbatch' or 'error'"):
        gapless.plain_step(model, *batch(), loss=F.mse_loss, microbatches=2, batchnorm="later")  # type: ignore[arg-type]


class Checkpointed(nn.Module):
    """Its parts inside as many checkpoints as asked for."""

    def __init__(self, *parts: nn.Module, depth: int = 1, use_reentrant: bool = False) -> None:
        super().__init__()
        self.parts, self.depth, self.use_reentrant = nn.Sequential(*parts), depth, use_reentrant

    def forward(self, x: Tensor) -> Any:
        call: Any = self.parts
        for _ in range(self.depth):
            call = functools.partial(checkpoint, call, use_reentrant=self.use_reentrant)
        return call(x)


def checkpointed(momentum: float | None = 0.1, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        Checkpointed(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=momentum), nn.Tanh(), nn.Linear(6, 6), **options)
        for _ in range(3)
    ]
    return nn.Sequential(nn.Linear(6, 6), *blocks)


@pytest.mark.in_pairs
@pytest.mark.parametrize("remat", ["none", "stage", "layer"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(
    ("use_reentrant", "depth", "momentum"), [(False, 1, 0.1), (True, 1, 0.1), (True, 2, 0.1), (False, 1, None)]
)
def test_a_batch_norm_in_a_checkpoint_moves_as_often_as_in_the_plain_loop(
    use_reentrant: bool, depth: int, momentum: float | None, schedule: str, remat: Any
) -> None:
    """The recompute moved the statistics after forwards of later microbatches had; with remat torch refused it."""
    model = checkpointed(momentum, depth=depth, use_reentrant=use_reentrant)
    reference = copy.deepcopy(model)
    with gapless.Pipeline(
        model, devices=2, schedule=schedule, microbatches=4, loss=F.mse_loss, remat=remat, intra_op_threads=1
    ) as pipe:
        for step in range(2):
            x, y = batch()
            pipe.step(x, y)
            loop(reference, x, y)
            assert_same_gradients(model, reference, f"step {step}")
            assert_same(buffers_of(model), buffers_of(reference), f"step {step}, buffers")


@pytest.mark.parametrize("remat", ["none", "stage"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_a_checkpoint_computes_again_does_not_count_for_deferred_statistics(
    use_reentrant: bool, remat: Any
) -> None:
    model = checkpointed(depth=2, use_reentrant=use_reentrant)
    without = checkpointed(depth=0)
    for each in (model, without):
        torch.manual_seed(1)
        assert_exact(each, batchnorm="deferred", devices=2, schedule="1f1b", remat=remat)
    assert_same(buffers_of(model), buffers_of(without), "buffers")


def test_a_batch_norm_that_is_computed_again_in_an_order_that_nobody_knows_is_refused() -> None:
    twice = nn.BatchNorm1d(6)
    shared = Checkpointed(twice, nn.Linear(6, 6), twice, nn.Linear(6, 6))
    dead = Do(lambda part, linear, x: (part(x), linear(x))[1], Checkpointed(nn.BatchNorm1d(6)), nn.Linear(6, 6))
    for layer, message in ((shared, "is used twice in one forward"), (dead, "was not computed again as often")):
        with (
            gapless.Pipeline([nn.Linear(6, 6), layer], devices=2, microbatches=3, loss=F.mse_loss) as pipe,
            pytest.raises(ConfigError, match=f"a batch norm inside torch.utils.checkpoint {message}.* or use remat="),
        ):
            pipe.step(*batch())
