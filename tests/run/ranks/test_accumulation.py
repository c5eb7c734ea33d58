"""A minibatch that takes several steps on replicas: each adds up its own, and the last step exchanges the sums."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import gapless
from gapless.errors import ConfigError, TransportError
from gapless.train import Trainer
from tests.by_hand import seeded_loop
from tests.pipelines import SEED, assert_same, mlp, tokens
from tests.run.forked import Launch
from tests.run.ranks.test_many_processes import logits_loss, tied_layers

Grads = dict[str, Tensor]


def mesh_of_four() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))


def samples(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 6), torch.randn(count, 6)


def made(make: Callable[[], nn.Sequential]) -> nn.Sequential:
    torch.manual_seed(6)
    return make()


def grads(model: nn.Module) -> Grads:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def accumulated(model: nn.Sequential, data: Any, loss: Any, first_step: int, replica: int) -> None:
    """What one replica's plain loop adds to its gradients: each microbatch by its share of the samples of all replicas
    in all steps; `data` has the steps, and in each the batches of all replicas.
    """
    samples = sum(len(x) for step in data for x, _ in step)
    for step, batches in enumerate(data):
        place: dict[str, Any] = {"seed": SEED, "step": first_step + step, "first": 4 * replica, "samples": samples}
        seeded_loop(model, *batches[replica], loss=loss, **place)


def check(
    make: Callable[[], nn.Sequential],
    batch: Callable[[int], tuple[Tensor, Tensor]],
    loss: Any,
    steps: int = 3,
    **options: Any,
) -> None:
    """Twice `steps` steps, the second minibatch on top of the gradients of the first."""
    mesh = mesh_of_four()
    replica = mesh.get_local_rank("dp")
    model = made(make)
    total: Grads = {}
    with gapless.Pipeline(model, mesh=mesh, microbatches=4, loss=loss, seed=SEED, **options) as pipe:
        for first in (0, steps):
            torch.manual_seed(20 + first)
            data = [[batch(8) for _ in range(2)] for _ in range(steps)]
            local = [made(make) for _ in range(2)]
            for number, each in enumerate(local):
                accumulated(each, data, loss, first, number)
            for number, batches in enumerate(data):
                last = number == steps - 1
                pipe.step(*batches[replica], weight=1 / steps, sync=last)
                if not last and "tied" not in options:  # nothing was exchanged
                    each = made(make)
                    accumulated(each, [*data[: number + 1]], loss, first, replica)
                    scale = (number + 1) / steps
                    for name, parameter in pipe.named_parameters():
                        assert parameter.grad is not None
                        torch.testing.assert_close(parameter.grad, grads(each)[name] * scale)
                if number == 0:
                    pipe.evaluate(*batches[replica])
            sums = {name: grad + grads(local[1])[name] for name, grad in grads(local[0]).items()}
            total = {name: total[name] + grad if name in total else grad for name, grad in sums.items()}
            for name, parameter in pipe.named_parameters():
                assert parameter.grad is not None
                if options.get("tied") == "summed":
                    torch.testing.assert_close(parameter.grad, total[name])
                else:
                    assert_same(parameter.grad, total[name], f"{options}, minibatch {first}, {name}")


def exact() -> None:
    check(lambda: mlp(8, dropout=0.3), samples, F.mse_loss, schedule="zb-v")
    check(tied_layers, tokens, logits_loss, tied="exact", schedule="zb-h1")
    check(tied_layers, tokens, logits_loss, tied="summed", steps=2)


def test_replicas_add_up_their_own_steps_and_exchange_once(launch: Launch) -> None:
    launch(exact, 4)


# -- targets that do not count -----------------------------------------------------------------------------------------


class Seen(torch.optim.SGD):
    """Keeps the gradients of its only step."""

    def step(self, closure: Any = None) -> Any:
        self.grads = {each: each.grad.clone() for each in self.param_groups[0]["params"]}
        return super().step(closure)


def ignored() -> None:
    """An update of two minibatches, cut unevenly between replicas, with targets left out unevenly everywhere."""
    mesh = mesh_of_four()
    replica = mesh.get_local_rank("dp")
    torch.manual_seed(8)
    whole = [(torch.randn(size, 6), torch.randint(0, 6, (size,))) for size in (9, 7)]
    for number, (_, y) in enumerate(whole):
        y[torch.rand(len(y)) < 0.2 + 0.3 * number] = -100
    data = [[(x.tensor_split(2)[each], y.tensor_split(2)[each]) for each in range(2)] for x, y in whole]
    counted = sum(int((y != -100).sum()) for _, y in whole)
    local = [made(lambda: mlp(8)) for _ in range(2)]
    for each, model in enumerate(local):
        for step in data:
            for x, y in zip(*(tensor.tensor_split(2) for tensor in step[each]), strict=True):
                total = F.cross_entropy(model(x), y) * (int((y != -100).sum()) / counted)
                total.backward()
    wanted = {name: grad + grads(local[1])[name] for name, grad in grads(local[0]).items()}
    for loss in (F.cross_entropy, nn.CrossEntropyLoss(reduction="sum")):
        with gapless.Pipeline(made(lambda: mlp(8)), mesh=mesh, microbatches=2, loss=loss) as pipe:
            optimizer = Seen(pipe.parameters(), lr=0.1)
            mine = [step[replica] for step in data]
            if not isinstance(loss, nn.Module):
                Trainer(pipe, optimizer, mine, steps=1, accumulate=2).run()
                for name, parameter in pipe.named_parameters():
                    assert_same(optimizer.grads[parameter], wanted[name], name)
            else:
                assert pipe.shares(mine) == [1.0, 1.0]
    with (
        gapless.Pipeline(
            made(lambda: mlp(8)), mesh=mesh, microbatches=2, loss=lambda z, y: (z.sum(1) - y).mean()
        ) as pipe,
        pytest.raises(ConfigError, match="targets of -100 are spread unevenly"),
    ):
        pipe.shares(mine)


def test_what_minibatches_of_an_update_count_is_counted_over_all_replicas(launch: Launch) -> None:
    """Each replica counted its own targets: they disagreed about the weight of a step, and training ended."""
    launch(ignored, 4)


# -- SIGTERM -----------------------------------------------------------------------------------------------------------


def asked_to_leave() -> None:
    x, y = samples(8)
    with gapless.Pipeline(made(lambda: mlp(8)), mesh=mesh_of_four(), microbatches=4, loss=F.mse_loss) as pipe:

        def stopping() -> bool:
            dist.barrier()
            return pipe.stopping

        pipe.step(x, y)
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        pipe.clip_grad_norm_(1.0)  # which each replica does by itself: some may be beyond it
        assert not stopping()
        for sync in (False, False, True):
            assert not stopping()
            pipe.step(x, y, sync=sync)
        assert stopping()
        with pytest.raises(SystemExit):
            pipe.step(x, y)


def test_ranks_that_are_asked_to_leave_finish_the_minibatch_first(launch: Launch) -> None:
    """They left between two of its steps: statistics of batch norms had moved, and were saved so."""
    launch(asked_to_leave, 4)


# -- gradients from before ---------------------------------------------------------------------------------------------


def left_from_before() -> None:
    """What was exchanged counts once; what is set to zero, or dropped, does not count."""
    mesh = mesh_of_four()
    replica = mesh.get_local_rank("dp")
    torch.manual_seed(3)
    data = [[samples(8) for _ in range(2)] for _ in range(4)]

    def run(pipe: gapless.Pipeline, numbers: str) -> Grads:
        for number in numbers:
            pipe.step(*data[int(number)][replica], sync=number == "3")
        return {name: each.grad.clone() for name, each in pipe.named_parameters() if each.grad is not None}

    def pipeline() -> gapless.Pipeline:
        return gapless.Pipeline(made(lambda: mlp(8)), mesh=mesh, microbatches=4, loss=F.mse_loss, seed=SEED)

    with pipeline() as pipe:
        wanted = run(pipe, "123")
    for set_to_none in (True, False):
        with pipeline() as pipe:
            run(pipe, "3")
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            optimizer.zero_grad(set_to_none)  # after an exchange
            same(run(pipe, "123"), wanted)
        with pipeline() as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            run(pipe, "3")
            run(pipe, "0")
            optimizer.zero_grad(set_to_none)  # before it: what is left of all steps so far goes
            same(run(pipe, "123"), wanted)
    with pipeline() as pipe:
        run(pipe, "30")
        pipe.zero_grad()
        pipe.clip_grad_norm_(1.0)
        same(run(pipe, "123"), wanted)
    with pipeline() as pipe:
        run(pipe, "3")
        run(pipe, "0")
        for parameter in pipe.parameters():
            parameter.grad.mul_(0.5)  # type: ignore[union-attr]
        with pytest.raises((ConfigError, TransportError), match="gradients changed after a step with sync=False"):
            run(pipe, "3")


def same(ours: Grads, wanted: Grads) -> None:
    assert ours.keys() == wanted.keys()
    for name, grad in ours.items():
        assert_same(grad, wanted[name], name)


def test_gradients_left_from_before_count_once(launch: Launch) -> None:
    launch(left_from_before, 4)


# -- mistakes ----------------------------------------------------------------------------------------------------------


def forgotten() -> None:
    mesh = mesh_of_four()
    x, y = samples(8)

    def pipeline() -> gapless.Pipeline:
        return gapless.Pipeline(made(lambda: mlp(8)), mesh=mesh, microbatches=4, loss=F.mse_loss, seed=SEED)

    def trained(pipe: gapless.Pipeline) -> None:
        pipe.step(x, y, weight=0.5, sync=False)
        pipe.step(x, y, weight=0.5, sync=False)
        optimizer = torch.optim.AdamW(pipe.parameters())
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()  # no rank hears of another's refusal in a step of its own

    words = "parameters changed after 2 steps with sync=False"
    calls: list[Callable[[gapless.Pipeline], Any]] = [
        lambda pipe: pipe.step(x, y),
        lambda pipe: pipe.evaluate(x),
        lambda pipe: pipe.state_dict(),
        lambda pipe: pipe.zero_grad(),
    ]
    for call in calls:
        with pipeline() as pipe:
            trained(pipe)
            with pytest.raises((ConfigError, TransportError), match=words):
                call(pipe)
            dist.barrier()
    with pipeline() as pipe:
        pipe.step(x, y, sync=False)
        with pytest.raises(ConfigError, match=r"clip_grad_norm_ came after 1 step with sync=False"):
            pipe.clip_grad_norm_(1.0)
        pipe.load_state_dict(pipe.state_dict())  # the same values everywhere
        pipe.step(x, y)
        pipe.clip_grad_norm_(1.0)
        torch.optim.AdamW(pipe.parameters()).step()
        pipe.step(x, y)


def test_a_forgotten_exchange_is_noticed(launch: Launch) -> None:
    """The optimizer used what each replica had added up alone, and their weights went apart without a word."""
    launch(forgotten, 4)


def twice(pipe: gapless.Pipeline, x: Tensor, y: Tensor, **asked: Any) -> None:
    """Whoever has ended the first step before it fails elsewhere hears of it in the second."""
    for _ in range(2):
        pipe.step(x, y, **asked)


def disagreeing() -> None:
    x, y = samples(8)
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    for mesh, odd, what in (
        (mesh_of_four(), 0, "weight"),
        (mesh_of_four(), 3, "sync"),
        (line, 3, "weight"),
        (line, 0, "sync"),
    ):
        with gapless.Pipeline(made(lambda: mlp(8)), mesh=mesh, microbatches=4, loss=F.mse_loss, timeout=40) as pipe:
            pipe.step(x, y, weight=0.5, sync=False)
            other = dist.get_rank() == odd
            asked: dict[str, Any] = {"weight": 0.25 if other else 0.5} if what == "weight" else {"sync": other}
            with pytest.raises((ConfigError, TransportError), match="all ranks make the same calls"):
                twice(pipe, x, y, **asked)
            dist.barrier()


def test_ranks_that_disagree_about_weight_or_sync_are_refused(launch: Launch) -> None:
    launch(disagreeing, 4)


# -- FSDP --------------------------------------------------------------------------------------------------------------


def sharded() -> None:
    """FSDP2 adds up whole gradients on each replica and reduces them at the last step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    replica = mesh.get_local_rank("dp")
    model, plain = made(lambda: mlp(8)), made(lambda: mlp(8))
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh["dp"])
    torch.manual_seed(5)
    data = [samples(12) for _ in range(3)]
    with gapless.Pipeline(model, mesh=mesh, schedule="zb-h1", microbatches=4, loss=F.mse_loss) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for minibatch in range(2):
            if minibatch == 1:  # one that is given up on
                pipe.step(*(whole.tensor_split([5])[replica] for whole in data[0]), sync=False)
                pipe.zero_grad()
            for number, (x, y) in enumerate(data):
                pipe.step(*(whole.tensor_split([5])[replica] for whole in (x, y)), weight=1 / 3, sync=number == 2)
                if number < 2:
                    assert all(parameter.grad is None for parameter in pipe.parameters())
                (F.mse_loss(plain(x), y) / 3).backward()
            names = dict(plain.named_parameters())
            for name, parameter in pipe.named_parameters():
                assert parameter.grad is not None
                whole = parameter.grad.full_tensor()  # type: ignore[attr-defined]
                torch.testing.assert_close(whole, names[name].grad, atol=1e-6, rtol=1e-5)
            optimizer.step()
            optimizer.zero_grad()
            torch.optim.SGD(plain.parameters(), lr=0.1).step()
            plain.zero_grad()


def test_sharded_stages_reduce_their_gradients_at_the_last_step(launch: Launch) -> None:
    launch(sharded, 4)
