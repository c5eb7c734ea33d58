"""Ranks of one pipeline that get different batches, or start with different weights, are refused: nothing else would
show it.
"""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gapless.errors import ConfigError
from gapless.run.ranks.fingerprints import UNKNOWN, differ, fingerprints
from tests.run.forked import Launch
from tests.run.ranks.watch.test_watch import pipeline, say


def layers(count: int = 4, seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [nn.Linear(6, 6) for _ in range(count)]


def batch(seed: int, count: int = 16) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(count, 6, generator=chance), torch.randn(count, 6, generator=chance)


# -- batches -----------------------------------------------------------------------------------------------------------


def shuffles() -> None:
    me, last = dist.get_rank(), dist.get_world_size() - 1
    words = rf"different batches in step \d+: rank 0, which has the first stage, .* rank {last}, which has the last"
    with pipeline(layers()) as pipe:
        for seed in range(3):
            pipe.step(*batch(seed))
        for _ in range(2):  # a refusal leaves everything as it was
            with pytest.raises(ConfigError, match=words):
                pipe.step(*batch(me))
        for seed in range(20):
            pipe.step(*batch(seed))
        for seed in range(100):  # later they are compared less often, but they are
            try:
                pipe.step(*batch(100 + (seed if me else 0)))
            except ConfigError:
                say(f"noticed after {seed} steps")
                break
        with pytest.raises(ConfigError, match="different batches in evaluation 1:"):
            pipe.evaluate(*batch(me))
        grads = [parameter.grad for parameter in pipe.parameters()]
        assert all(grad is not None for grad in grads)


def test_ranks_that_shuffle_differently_are_refused(launch: Launch) -> None:
    """One supplied x and another y, and it trained to a worse loss without a word."""
    assert launch(shuffles, 3).count("noticed after") == 3


def passes_what_is_right() -> None:
    """What a batch of one rank is, all of it, is a batch; and who does not use a part of it need not have it."""
    me, last = dist.get_rank(), dist.get_world_size() - 1
    with pipeline(layers()) as pipe:
        for seed in range(3):
            x, y = batch(seed)
            mine = (
                x if me == 0 else x + torch.randn(16, 6)
            )  # augmented by each rank for itself; only rank 0 uses its own
            pipe.step(mine, y)
            pipe.step(x, y if me == last else None)
            pipe.step(x, y if me == last else torch.randn(16, 6))  # the batch of the last rank
            pipe.step(*batch(seed, 5))  # a last batch that is smaller
            pipe.evaluate(x)
            pipe.evaluate(mine, y)
    with pipeline(layers(8), schedule="zb-v") as pipe:  # the first and the last stage are on the same rank
        for seed in range(3):
            pipe.step(*(batch(seed) if me == 0 else batch(100)))


def test_what_trains_right_is_not_refused(launch: Launch) -> None:
    launch(passes_what_is_right, 2)


def has_replicas() -> None:
    """Each with its own batches; the ranks of one of them disagree, and all four refuse."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    me, replica = dist.get_rank(), mesh.get_local_rank("dp")
    with pipeline(layers(2), mesh=mesh) as pipe:
        for seed in range(3):
            pipe.step(*batch(10 * replica + seed, 16 - 4 * replica))
        with pytest.raises(ConfigError, match="different batches"):
            pipe.step(*batch(me if replica == 1 else 0))
        pipe.step(*batch(replica))


def test_replicas_have_batches_of_their_own(launch: Launch) -> None:
    launch(has_replicas, 4)


def one_changes_its_shape() -> None:
    """Only rank 3 sees that this batch has another shape. Had the others begun with the step, they would be a step
    ahead of it from then on.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    me = dist.get_rank()
    x, y = batch(mesh.get_local_rank("dp"))
    with pipeline(layers(2), mesh=mesh, static_shapes=True) as pipe:
        pipe.step(x, y)
        words = "rank [23] rejected this step, so no rank begins it"
        if me == 3:
            words = r"the inputs of this one are float32 \[16, 7\], where they were float32 \[16, 6\]: give all steps"
        with pytest.raises(ConfigError, match=words):
            pipe.step(torch.zeros(16, 7) if me == 3 else x, y)
        pipe.evaluate(*batch(0, 5))  # may have any shape
        consistency: Any = pipe._world._consistency  # type: ignore[attr-defined]
        assert [consistency.agreed("", ready=me not in missing) for missing in ((), (0,), (3,))] == [True, False, False]
        before = [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]
        pipe.zero_grad()
        pipe.step(x, y)
        after = [parameter.grad for parameter in pipe.parameters() if parameter.grad is not None]
        assert before
        assert all(map(torch.equal, before, after))
        assert pipe.steps == 2


def test_a_batch_of_another_shape_on_one_rank_is_refused_by_all_where_shapes_are_static(launch: Launch) -> None:
    launch(one_changes_its_shape, 4)


# -- weights -----------------------------------------------------------------------------------------------------------

DIFFER = r"do not start with the same weights: 0.weight, 0.bias, 1.weight and 5 more differ between rank 0 and rank 1"


def starts_unequal() -> None:
    me = dist.get_rank()
    x, y = batch(0)
    with pipeline(layers(seed=me)) as pipe:
        for call in (pipe.step, pipe.evaluate, pipe.step):
            with pytest.raises(ConfigError, match=DIFFER):
                call(x, y)
        state = nn.Sequential(*layers()).state_dict()
        pipe.load_state_dict(state)  # the way out
        pipe.step(x, y)
        assert all(torch.equal(value, state[name]) for name, value in pipe.state_dict().items())
    with pipeline(layers(seed=me)) as pipe:  # so is any other way to give them values after the pipeline was made
        for parameter in pipe.parameters():
            nn.init.constant_(parameter, 0.1)
        pipe.step(x, y)
    loss = pipeline_loss(layers(), x, y)
    meta = layers()
    for number in range(4):
        if number // 2 != me:
            meta[number].to("meta")
    assert torch.equal(pipeline_loss(meta, x, y), loss)  # what a rank does not hold may be missing


def pipeline_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    with pipeline(model, init="reset_parameters") as pipe:
        loss = pipe.step(x, y).loss
        assert loss is not None
        return loss


def test_weights_that_start_unequal_are_refused_unless_they_are_loaded(launch: Launch) -> None:
    """Every rank made the whole model with a seed of its own, and the pipeline was a mixture of them."""
    launch(starts_unequal, 2)


class Net(nn.Module):
    """One that is traced."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers(seed=seed))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def replicas_start_unequal() -> None:
    """Replicas take the values of the first, whatever they had; so the ranks of that one must agree."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    me, replica = dist.get_rank(), mesh.get_local_rank("dp")
    for model in (layers, lambda seed: Net(seed)):
        with pipeline(model(seed=me if replica else 0), mesh=mesh) as pipe:
            pipe.step(*batch(replica))
            pipe.step(*batch(replica))
        with pipeline(model(seed=me if replica == 0 else 0), mesh=mesh) as pipe:
            words = "do not start with the same weights" if replica == 0 else r"rank [01]'s pipeline got different"
            with pytest.raises(ConfigError, match=words):
                pipe.step(*batch(replica))


def test_replicas_may_start_unequal_but_not_the_ranks_of_the_first(launch: Launch) -> None:
    launch(replicas_start_unequal, 4)


# -- fingerprints ------------------------------------------------------------------------------------------------------


def test_fingerprints_tell_samples_apart_and_forgive_last_bits() -> None:
    x = torch.randn(64, 300)
    tokens = torch.cat([torch.ones(256, 1), torch.randint(1000, (256, 63))], 1).long()  # all begin alike
    same = [x, tokens, torch.full((4,), float("nan")), torch.randn(4, dtype=torch.complex64), torch.empty(0)]
    assert not differ(fingerprints(same), fingerprints([each.clone() for each in same])).any()
    assert not differ(fingerprints([x]), fingerprints([x * (1 + 6e-8 * torch.randn_like(x))])).any()
    for one in (x, tokens, torch.arange(8), tokens[:3].float()):
        assert differ(fingerprints([one]), fingerprints([one.roll(1, 0)])).all()
    assert differ(fingerprints([x[:8]]), fingerprints([x[:9]])).all()
    for unknown in (torch.empty(3, device="meta"), x.to_sparse()):
        assert tuple(fingerprints([unknown])[0].tolist()) == UNKNOWN
        assert not differ(fingerprints([unknown]), fingerprints([x])).any()


def test_a_fingerprint_costs_little() -> None:
    images = torch.randn(32, 3, 64, 64)
    fingerprints([images])
    start = time.perf_counter()
    for _ in range(20):
        fingerprints([images, torch.arange(32)])
    assert (time.perf_counter() - start) / 20 < 0.5  # some 0.2 ms


def test_labels_are_told_apart() -> None:
    chance = torch.Generator().manual_seed(3)
    for _ in range(300):
        one, other = (torch.randint(5, (6,), generator=chance) for _ in range(2))
        assert bool(differ(fingerprints([one]), fingerprints([other]))) != torch.equal(one, other)
