"""What ranks with a GPU do in tests. Not in the file of the tests: to ask for a GPU, as those do, spoils a fork."""

import contextlib
import copy
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gapless
from gapless.run.world import TransportName
from gapless.zoo.gpt import gpt, next_token_loss
from tests.pipelines import SEED, assert_same, mlp

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 6)


def mesh_over(backend: str, replicas: int = 1) -> DeviceMesh:
    """With NCCL, or with Gloo alone. The launcher's group is Gloo; several ranks may share a GPU."""
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    count = dist.get_world_size()
    if backend == "nccl":
        rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
        dist.destroy_process_group()
        again = dist.distributed_c10d.PrefixStore("again", store)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=again, rank=rank, world_size=count)
    if replicas > 1:
        return init_device_mesh("cuda", (replicas, count // replicas), mesh_dim_names=("dp", "pp"))
    return init_device_mesh("cuda", (count,), mesh_dim_names=("pp",))


def steps_on_the_gpu(backend: TransportName, schedule: str, remat: Any = "none", how: str = "") -> None:
    """Some steps of an MLP and of a GPT with dropout, equal to the plain loop on the same GPU."""
    mesh, graphs = mesh_over(backend), "graphs" in how
    torch.manual_seed(0)
    tokens = torch.randint(0, 11, (8, 5), generator=torch.Generator().manual_seed(2))
    for model, inputs, target, loss in (
        (mlp(16), X, Y, F.mse_loss),
        (gpt(vocab=11, width=8, depth=16, heads=2, context=5, dropout=0.1), tokens, tokens, next_token_loss),
    ):
        reference = copy.deepcopy(model).cuda()
        inputs, target = inputs.cuda(), target.cuda()
        with gapless.Pipeline(
            model,
            mesh=mesh,
            schedule=schedule,
            microbatches=4,
            loss=loss,
            seed=SEED,
            remat=remat,
            transport=backend,
            static_shapes="static" in how or ("auto" if "auto" in how else False),
            graphs=graphs,
        ) as pipe:
            for number in range(6 if how else 3):
                ours = pipe.step(inputs, target)
                plain = gapless.plain_step(reference, inputs, target, loss=loss, microbatches=4, seed=SEED, step=number)
                assert_same(ours.loss, plain.loss, f"{schedule}, step {number}, loss")
                grads = dict(reference.named_parameters())
                for name, parameter in pipe.named_parameters():
                    assert parameter.is_cuda
                    assert_same(parameter.grad, grads[name].grad, f"{schedule}, step {number}, {name}")
            assert pipe.evaluate(inputs, target).loss is not None
            assert not graphs or "no graphs" not in repr(pipe), repr(pipe)
            assert ("with static shapes" in repr(pipe)) == bool(how and how != "graphs"), repr(pipe)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(64), nn.Linear(64, 64), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.dropout(torch.tanh(self.linear(self.norm(x))))
        return x + added


MICROBATCHES = 8
RATE = 0.05


def batch_of(step: int, replica: int) -> tuple[Tensor, Tensor]:
    """Shapes change with the step: microbatches of one or two, of one to three rows."""
    generator = torch.Generator().manual_seed(1000 * replica + step)
    size, rows = (8, 11, 16)[step // 20 % 3], 1 + step // 7 % 3
    x, y = torch.randn(2, size, rows, 64, generator=generator).unbind()
    return x.cuda(), y.cuda()


def plain_training(model: nn.Sequential, steps: int, replicas: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    """As a user would write it: the loss and the gradients of each step."""
    losses, grads = [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(steps):
        total, parts = torch.zeros((), device="cuda"), []
        batches = [batch_of(step, replica) for replica in range(replicas)]
        samples = sum(len(x) for x, _ in batches)
        for replica, (x, y) in enumerate(batches):
            model.zero_grad()
            pairs = zip(x.tensor_split(MICROBATCHES), y.tensor_split(MICROBATCHES), strict=True)
            for number, (hidden, target) in enumerate(pairs, replica * MICROBATCHES):
                share = len(hidden) / samples
                for layer, block in enumerate(model):
                    torch.manual_seed(gapless.seed_of(SEED, step, number, layer))
                    hidden = block(hidden)
                loss = F.mse_loss(hidden, target)
                (loss * share).backward()
                total = total + loss.detach() * share
            parts.append([each.grad for each in model.parameters() if each.grad is not None])
        losses.append(total)
        grads.append([sum(several) for several in zip(*parts, strict=True)] if replicas > 1 else parts[0])
        for parameter, grad in zip(model.parameters(), grads[-1], strict=True):
            parameter.grad = grad
        optimizer.step()
    return losses, grads


def many_steps(backend: TransportName, schedules: str, steps: str, replicas: str = "1", graphs: str = "") -> None:
    """Every step of training has the bits of the plain loop, for each of these schedules, evaluations in between."""
    mesh, copies = mesh_over(backend, int(replicas)), int(replicas)
    replica = mesh.get_local_rank("dp") if copies > 1 else 0
    torch.manual_seed(0)
    start = nn.Sequential(*(Block() for _ in range(16)))
    trained = copy.deepcopy(start).cuda()
    losses, grads = plain_training(trained, int(steps), copies)
    names = [name for name, _ in start.named_parameters()]
    for schedule in schedules.split(","):
        began = time.monotonic()
        model = copy.deepcopy(start)
        with gapless.Pipeline(
            model,
            mesh=mesh,
            schedule=schedule,
            microbatches=MICROBATCHES,
            loss=F.mse_loss,
            seed=SEED,
            transport=backend,
            graphs=bool(graphs),
        ) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=RATE)
            for step in range(int(steps)):
                x, y = batch_of(step, replica)
                if step % 20 == 3:
                    assert pipe.evaluate(x, y).loss is not None
                found = pipe.step(x, y)
                where = f"{schedule}, step {step}"
                assert_same(found.loss, losses[step], f"{where}, loss")
                expected = dict(zip(names, grads[step], strict=True))
                mine = [(parameter.grad, expected[name]) for name, parameter in pipe.named_parameters()]
                ours, plain = (torch.cat([each.flatten() for each in some]) for some in zip(*mine, strict=True))
                assert torch.equal(ours, plain), f"{where}: {int((ours != plain).sum())} gradients differ"
                optimizer.step()
                optimizer.zero_grad()
            assert not graphs or "no graphs" not in repr(pipe), repr(pipe)
            weights = dict(trained.named_parameters())
            for name, parameter in pipe.named_parameters():
                assert_same(parameter.detach(), weights[name].detach(), f"{schedule}, {name} in the end")
            x, y = batch_of(0, replica)
            trained.eval()
            with torch.no_grad():
                outputs = torch.cat([trained(part) for part in x.tensor_split(MICROBATCHES)])
            merged = pipe.evaluate(x, y).outputs
            if merged is not None:
                assert_same(merged, outputs, f"{schedule}, evaluated")
        if dist.get_rank() == 0:
            seconds = time.monotonic() - began
            ranks = f"{dist.get_world_size()} ranks, {copies} replicas"
            print(f"{backend}, {ranks}, {schedule}: {steps} steps in {seconds:.1f} s", flush=True)


def planned_on_the_gpu(backend: str) -> None:
    """Links through the channels of a pipeline, and the plan that all ranks have."""
    mesh = mesh_over(backend)
    (link,) = gapless.measure_links(mesh)
    assert 1e-6 < link.latency < 0.1, link
    assert link.bandwidth is not None
    assert 1e7 < link.bandwidth < 1e14, link
    model = mlp(16)
    plan = gapless.make_plan(
        model, X.cuda(), Y.cuda(), mesh=mesh, loss=F.mse_loss, schedules=["1f1b", "zb-h1"], seconds=0.1
    )
    with gapless.Pipeline(model, mesh=mesh, schedule=plan, loss=F.mse_loss) as pipe:
        assert pipe.step(X.cuda(), Y.cuda()).loss is not None


def chooses_its_schedule(backend: TransportName) -> None:
    """Two stages per GPU only where messages go through memory."""
    for count, expected in ((8, "zb-v" if backend == "memory" else "1f1b"), (6, "1f1b")):
        layers = [nn.Linear(4, 4) for _ in range(count)]
        with gapless.Pipeline(layers, mesh=mesh_over(backend), loss=F.mse_loss, transport=backend) as pipe:
            assert pipe.schedule.name == expected


def trees_on_the_gpu(backend: TransportName) -> None:
    """Several tensors, integers, booleans, none, zero elements and other strides cross between ranks."""
    mesh = mesh_over(backend)
    torch.manual_seed(0)
    model = nn.Sequential(*(Mixed() for _ in range(4 * mesh.size())))
    reference = copy.deepcopy(model).cuda()
    with gapless.Pipeline(
        model, mesh=mesh, schedule="interleaved", microbatches=4, loss=tree_loss, transport=backend
    ) as pipe:
        for size in (8, 4, 13):
            x = torch.randn(size, 6, 5, generator=torch.Generator().manual_seed(size)).cuda()
            found = pipe.step(x, x)
            for hidden in x.tensor_split(4):
                (tree_loss(reference(hidden), hidden) * (len(hidden) / size)).backward()
            grads = dict(reference.named_parameters())
            assert found.loss is not None
            for name, parameter in pipe.named_parameters():
                assert_same(parameter.grad, grads[name].grad, f"{size}, {name}")


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, state: Any) -> Any:
        if isinstance(state, Tensor):
            empty = torch.empty(0, 3, device=state.device)
            state = {"x": state, "count": torch.zeros(2, dtype=torch.int64, device=state.device), "none": None}
            state |= {"empty": empty, "keep": state["x"].detach() > 0, "turned": state["x"].transpose(1, 2)}
        x = torch.tanh(self.linear(state["x"])) * state["keep"] + state["turned"].transpose(1, 2)
        return {**state, "x": x, "count": state["count"] + 1, "turned": x.transpose(1, 2), "keep": ~state["keep"]}


def tree_loss(state: dict[str, Any], target: Tensor) -> Tensor:
    return F.mse_loss(state["x"] * state["count"][0] * 0.125, target)


def changes_its_shape(backend: TransportName) -> None:
    """After three steps of one shape, one of another, and what each rank says to it. Then an edit on one rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    reference = copy.deepcopy(model).cuda()
    pipe = gapless.Pipeline(
        model,
        mesh=mesh_over(backend),
        microbatches=4,
        loss=F.mse_loss,
        seed=SEED,
        timeout=60,
        transport=backend,
        static_shapes=True,
    )
    x, y = torch.randn(8, 64, device="cuda"), torch.zeros(8, 64, device="cuda")
    for count in (1, 2, 3):
        pipe.step(x, y)
        evaluated = pipe.evaluate(torch.cat([x] * count), torch.cat([y] * count))  # of any shape
        assert evaluated.loss is not None
    with refused():
        pipe.step(torch.cat([x, x]), torch.cat([y, y]))
    if dist.get_rank() == 0:  # which makes its program anew
        model[0].register_forward_hook(lambda *_: None)
    for step in (3, 4, 5):
        ours = pipe.step(step * x, y)
        plain = gapless.plain_step(reference, step * x, y, loss=F.mse_loss, microbatches=4, seed=SEED, step=step)
        assert_same(ours.loss, plain.loss, f"step {step}")
    pipe.close()


class Narrows(nn.Module):
    """As many columns as its input tells."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : int(x[0, 0])] * self.scale


def makes_another_shape(backend: TransportName) -> None:
    """After three steps of one shape, one in which the shape depends on numbers, and what each rank says to it."""
    pipe = gapless.Pipeline(
        [Narrows(), nn.Identity(), nn.Identity()],
        mesh=mesh_over(backend),
        microbatches=4,
        loss=mean,
        timeout=60,
        transport=backend,
        static_shapes=True,
        graphs=False,
    )
    x, y = torch.full((8, 64), 64.0, device="cuda"), torch.zeros(8, 64, device="cuda")
    for _ in range(3):
        pipe.step(x, y)
    with refused():
        pipe.step(x / 2, y)
    pipe.close()


def varies_its_shape(backend: TransportName) -> None:
    """Shapes that depend on the numbers, and batches of several shapes, without a promise."""
    for model in ([Narrows(), nn.Identity(), nn.Identity()], [nn.Linear(64, 64).cuda() for _ in range(3)]):
        reference: list[Any] = copy.deepcopy(model)
        pipe = gapless.Pipeline(
            model, mesh=mesh_over(backend), microbatches=4, loss=mean, timeout=60, transport=backend, seed=SEED
        )
        for step in range(16):
            torch.manual_seed(step)
            x = torch.full((8 if step % 8 < 6 else 12, 64), float(64 - 4 * (step % 3)), device="cuda")
            ours = pipe.step(x, x)
            plain = gapless.plain_step(reference, x, x, loss=mean, microbatches=4, seed=SEED, step=step)
            assert_same(ours.loss, plain.loss, f"step {step}")
            used = "with static shapes" in repr(pipe)
            if isinstance(model[0], Narrows) or step in (0, 1, 2, 3, 6, 7, 8, 9, 14, 15):
                assert not used, (step, repr(pipe))
            elif step in (11, 12, 13):
                assert used, (step, repr(pipe))
        pipe.close()


def mean(outputs: Tensor, target: Tensor) -> Tensor:
    return outputs.mean() + 0 * target.mean()


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """What is said is printed."""
    try:
        yield
    except gapless.GaplessError as error:
        print(f"rank {dist.get_rank()} says: {error}", flush=True)
    else:
        raise AssertionError("nobody has refused")


def chunks(names: Sequence[str], size: int) -> list[str]:
    """Lists of names, as words of a command."""
    found = iter(names)
    return [",".join(part) for part in iter(lambda: list(itertools.islice(found, size)), [])]


def waits_for_a_killed_rank(backend: TransportName, how: str, *environment: str) -> None:
    """Steps until somebody ends a rank."""
    os.environ.update(dict(each.split("=", 1) for each in environment))
    mesh = mesh_over(backend)
    model = nn.Sequential(*(Block() for _ in range(8)))
    pipe = gapless.Pipeline(
        model,
        mesh=mesh,
        schedule="1f1b",
        microbatches=8,
        loss=F.mse_loss,
        timeout=60,
        transport=backend,
        static_shapes=how == "static",
    )
    print("began", flush=True)
    x, y = batch_of(0, 0)
    for _ in range(100_000):
        pipe.step(x, y)
        print("step", flush=True)
