"""Gradients of replicas, of every kind that torch makes: what they add up to is the plain loop's."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gapless
from gapless.errors import ConfigError, GaplessError, PartitionError
from gapless.run.ranks import replicas
from tests.by_hand import loop
from tests.pipelines import Own, assert_same
from tests.run.forked import Launch


def pipeline(layers: Sequence[nn.Module], **options: Any) -> gapless.Pipeline:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    asked: dict[str, Any] = {"mesh": mesh, "microbatches": 2, "loss": F.mse_loss, "timeout": 60.0, **options}
    return gapless.Pipeline(list(layers), **asked)


def close(ours: Tensor | None, theirs: Tensor | None, where: str) -> None:
    assert ours is not None, where
    assert theirs is not None, where
    assert (ours.dtype, ours.layout) == (theirs.dtype, theirs.layout), where
    torch.testing.assert_close(ours.to_dense(), theirs.to_dense(), rtol=1e-6, atol=1e-7, msg=where)


def plain_grads(layers: Sequence[nn.Module], x: Tensor, y: Tensor, replicas: int = 2) -> None:
    """Every microbatch by its share of all samples, on one device."""
    loop(nn.Sequential(*layers), x, y, 2 * replicas)


def assert_halves_are_plain(layers: list[nn.Linear], plain: list[nn.Linear], x: Tensor, y: Tensor) -> None:
    """Two replicas, each with half of a batch, have the gradients of the plain loop."""
    plain_grads(plain, x, y)
    share = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    with pipeline(layers) as pipe:
        pipe.step(x[share], y[share])
    for number, (one, other) in enumerate(zip(layers, plain, strict=True)):
        for name, each in one.named_parameters():
            close(each.grad, other.get_parameter(name).grad, f"{number}.{name}")


def in_buckets() -> None:
    """A stage of more bytes than a bucket has, as those of real models are."""
    replicas._BUCKET_BYTES = 200
    torch.manual_seed(0)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    layers = [nn.Linear(6, 6) for _ in range(3)]
    plain = copy.deepcopy(layers)
    assert_halves_are_plain(layers, plain, x, y)


def test_a_stage_may_have_several_buckets(launch: Launch) -> None:
    launch(in_buckets, 2)


# -- dtypes ------------------------------------------------------------------------------------------------------------


class Half(nn.Linear):
    """Weights of bfloat16, gradients of float32."""

    def __init__(self) -> None:
        super().__init__(6, 6, dtype=torch.bfloat16)
        for each in self.parameters():
            each.grad_dtype = torch.float32

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float(), self.bias.float())


def adds_in_float32() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    torch.manual_seed(1)
    layers, plain = [Half(), nn.Linear(6, 6)], [Half(), nn.Linear(6, 6)]
    for one, other in zip(layers, plain, strict=True):
        other.load_state_dict(one.state_dict())
    assert_halves_are_plain(layers, plain, x, y)


@pytest.mark.skipif(not hasattr(torch.empty(0), "grad_dtype"), reason="needs torch 2.13")
def test_float32_gradients_of_bfloat16_weights_are_added_as_such(launch: Launch) -> None:
    launch(adds_in_float32, 2)


# -- hooks ------------------------------------------------------------------------------------------------------------


def steps_in_a_hook() -> None:
    torch.manual_seed(1)
    layer = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    refused = pytest.raises(GaplessError, match=r"changed a weight .* with the gradient of this replica alone: step")
    with pipeline([layer], microbatches=1) as pipe, refused:
        pipe.step(torch.randn(4, 6), torch.randn(4, 6))


def test_an_optimizer_that_steps_before_gradients_are_added_is_refused(launch: Launch) -> None:
    launch(steps_in_a_hook, 2)


# -- sync=False --------------------------------------------------------------------------------------------------------


def sets_to_zero(way: str) -> None:
    """Between two steps of a minibatch, of which the first did not use a weight."""
    chance = torch.Generator().manual_seed(dist.get_rank())
    torch.manual_seed(1)
    parts = {"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)}
    layer: Any = Own(
        lambda layer, x: layer.b(layer.a(x) if layer.on else x), **parts, on=True
    )  # uses `a` only where asked to
    with pipeline([layer]) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)

        def step(**options: Any) -> None:
            pipe.step(torch.randn(4, 6, generator=chance), torch.randn(4, 6, generator=chance), **options)

        step()
        earlier = {name: each.grad.clone() for name, each in layer.named_parameters() if each.grad is not None}
        layer.on = False
        step(sync=False)
        assert_same(layer.a.weight.grad, earlier["a.weight"], "what was there is there")
        if way == "kept":
            step()
            assert_same(layer.a.weight.grad, earlier["a.weight"], "nobody has set it to zero")
            return
        optimizer.zero_grad(set_to_none=way == "none")
        step()
        assert layer.a.weight.grad is None or not layer.a.weight.grad.any(), "an old gradient came back"
        assert layer.b.weight.grad is not None


@pytest.mark.parametrize("way", ["none", "zeros", "kept"])
def test_a_gradient_that_was_set_to_zero_does_not_come_back(way: str, launch: Launch) -> None:
    """It was set aside for a minibatch of several steps, and the first of them did not use its weight."""
    launch(sets_to_zero, 2, way)


# -- sparse gradients --------------------------------------------------------------------------------------------------


def embeds() -> None:
    """Different rows on the two replicas, in the second step none on one of them."""
    torch.manual_seed(1)
    layers = [nn.Embedding(20, 6, sparse=True), nn.Linear(6, 6)]
    plain = [nn.Embedding(20, 6, sparse=True), nn.Linear(6, 6)]
    for one, other in zip(layers, plain, strict=True):
        other.load_state_dict(one.state_dict())
    chance = torch.Generator().manual_seed(3)
    share = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    with pipeline(layers) as pipe:
        for _ in range(3):  # the second on top of the first
            x, y = torch.randint(20, (8,), generator=chance), torch.randn(8, 6, generator=chance)
            pipe.step(x[share], y[share])
            plain_grads(plain, x, y)
            for number, (one, other) in enumerate(zip(layers, plain, strict=True)):
                for name, each in one.named_parameters():
                    close(each.grad, other.get_parameter(name).grad, f"{number}.{name}")
        torch.optim.SparseAdam(layers[0].parameters()).step()


def test_sparse_gradients_are_added_and_stay_sparse(launch: Launch) -> None:
    launch(embeds, 2)


# -- an empty share ----------------------------------------------------------------------------------------------------


def has_nothing() -> None:
    """One replica has no sample: all ranks refuse, and the next step works where all do."""
    me = dist.get_rank()
    with pipeline([nn.Linear(6, 6)]) as pipe:
        pipe.step(torch.ones(4, 6), torch.ones(4, 6))
        for _ in range(2):
            with pytest.raises(ConfigError, match="the batch is empty"):
                pipe.step(torch.ones(0, 6), torch.ones(0, 6))
        pipe.step(torch.ones(4, 6), torch.ones(4, 6))
        with pytest.raises(GaplessError, match="the batch is empty"):
            pipe.step(torch.ones(4 * me, 6), torch.ones(4 * me, 6))


def test_an_empty_share_of_one_replica_is_an_error_on_all_ranks_at_once(launch: Launch) -> None:
    """The others waited for ten minutes."""
    launch(has_nothing, 2, timeout=40)


# -- FSDP --------------------------------------------------------------------------------------------------------------


def shards(whole: str) -> None:
    """As torch's own recipe has it: the layers, then the model, which has a parameter of its own or not."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 6))
    plain = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 6))
    plain.load_state_dict(model.state_dict())
    for layer in list(model)[: None if whole == "all layers" else 2]:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    chance = torch.Generator().manual_seed(3)
    share = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    x, y = torch.randn(8, 6, generator=chance), torch.randn(8, 6, generator=chance)
    if whole != "all layers":
        with pytest.raises(ConfigError, match=r"has taken 2 of its parameters, .* first shard every layer"):
            gapless.Pipeline(model, mesh=mesh, microbatches=2, loss=F.mse_loss, timeout=60)
        traced: Any = fully_shard(nn.Transformer(4, 2, 1, 1, 8), mesh=mesh["dp"])
        with pytest.raises(ConfigError, match=r"FSDPTransformer is sharded by fully_shard, .* shard each layer"):
            gapless.Pipeline(traced, mesh=mesh, microbatches=2, loss=F.mse_loss, timeout=60)
        return
    with gapless.Pipeline(model, mesh=mesh, microbatches=2, loss=F.mse_loss, timeout=60) as pipe:
        for _ in range(2):
            pipe.step(x[share], y[share])
            plain_grads(list(plain), x, y)
        for name, each in pipe.named_parameters():
            grad: Any = each.grad
            torch.testing.assert_close(grad.full_tensor(), plain.get_parameter(name).grad, rtol=1e-5, atol=1e-6)


def test_a_model_that_is_sharded_after_its_layers_trains(launch: Launch) -> None:
    launch(shards, 2, "all layers")


def test_a_model_that_is_sharded_as_a_whole_is_refused(launch: Launch) -> None:
    launch(shards, 2, "some layers")


# -- refused -----------------------------------------------------------------------------------------------------------


def refused_often() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    for _ in range(60):
        with pytest.raises(PartitionError, match="give at least 1 layer per stage"):
            gapless.Pipeline(
                [nn.Linear(3, 3)], mesh=mesh, partition=[2, 7], microbatches=2, loss=F.mse_loss, timeout=60
            )


def test_a_rank_is_told_why_it_is_refused_though_the_other_was_quicker(launch: Launch) -> None:
    launch(refused_often, 2)
