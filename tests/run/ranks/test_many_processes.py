"""One process per device: the bits of the plain loop, on every rank for its part of the model.

Processes are expensive to start, so each launch runs many settings, one after another.
"""

import copy
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gapless
from gapless.run.ranks.wire.channel import Incoming, Outgoing
from gapless.run.ranks.wire.gloo import GlooIncoming, GlooOutgoing, OverGloo
from gapless.run.ranks.wire.groups import connected, network_device
from gapless.run.ranks.wire.layout import TreeLayout
from gapless.run.ranks.wire.message import Message, Reader, Writer
from gapless.schedule.recipes import RECIPES
from tests.by_hand import seeded_loop
from tests.pipelines import (
    CASES,
    SEED,
    Case,
    Do,
    Step,
    assert_same,
    batches,
    dicts,
    expected,
    made,
    mlp,
    parameters_of,
    schedule_named,
    tokens,
)
from tests.run.crew import Server
from tests.run.forked import Launch

SCHEDULES = (*(name for name, recipe in RECIPES.items() if recipe.synchronous), "text", "object")
REMATS = ("none", "stage", "layer")
MICROBATCHES = (4, 3, 8, 1)


def line(mesh_dim: str = "pp") -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(mesh_dim,))


def train(
    pipe: gapless.Pipeline, model: Any, case: Case, microbatches: int, steps: int, share: Callable[[Any], Any]
) -> list[tuple[gapless.Result, dict[int, Tensor | None], dict[int, Tensor]]]:
    """Some steps with an optimizer, the second and third accumulating: results, and by their place in the model the
    gradients and weights of the parameters that are here.
    """
    optimizer = case.optimizer(pipe.parameters())
    held = {id(parameter) for _, parameter in pipe.named_parameters()}
    here = {number: each for number, each in enumerate(parameters_of(model)) if id(each) in held}
    done = []
    for number, (inputs, target) in enumerate(batches(case, microbatches, steps)):
        result = pipe.step(share(inputs), share(target), outputs=True)
        grads = {place: None if p.grad is None else p.grad.clone() for place, p in here.items()}
        optimizer.step()
        if number != 1:
            optimizer.zero_grad()
        done.append((result, grads, {place: p.detach().clone() for place, p in here.items()}))
    return done


def same_steps(got: Iterable[Any], plain: Sequence[Step], last: bool, where: str) -> None:
    for number, ((result, grads, weights), step) in enumerate(zip(got, plain, strict=True)):
        place = f"{where}, step {number}"
        assert_same(result.loss, step.loss, f"{place}, loss")
        assert_same(result.losses, step.losses, f"{place}, losses")
        if last:
            assert_same(result.outputs, step.outputs, f"{place}, outputs")
        else:
            assert result.outputs is None
        for index, grad in grads.items():
            assert (grad is None) == (step.grads[index] is None), place
            if grad is not None:
                assert_same(grad, step.grads[index], f"{place}, gradient {index}")
            assert_same(weights[index], step.weights[index], f"{place}, weight {index}")


def check(case: Case, mesh: DeviceMesh, name: str, microbatches: int, remat: Any = "none", **options: Any) -> None:
    devices = mesh.size()
    depth = 8 if devices <= 4 else 2 * devices
    model = made(case, depth)
    with gapless.Pipeline(
        model,
        mesh=mesh,
        schedule=schedule_named(name, devices, microbatches),
        microbatches=microbatches,
        loss=case.loss,
        seed=SEED,
        remat=remat,
        **options,
    ) as pipe:
        got = train(pipe, model, case, microbatches, 3, lambda whole: whole)
        same_steps(got, expected(case, depth, microbatches, 3), pipe._staged.has_last, f"{case.name} {name} {remat}")


# -- the matrix --------------------------------------------------------------------------------------------------------


def sampled(*halves: str) -> None:
    """Each schedule of these halves once, with another model, remat and number of microbatches each time."""
    mesh = line()
    turns = zip(SCHEDULES, cycle(CASES), cycle(REMATS), cycle(MICROBATCHES), strict=False)
    for number, (name, case, remat, microbatches) in enumerate(turns):
        if str(number % 2) in halves:
            check(case, mesh, name, microbatches, remat)


@pytest.mark.parametrize(
    ("devices", "half"),
    [(2, "0"), (2, "1"), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((4, "1"), (4, "0")))],
)
def test_every_schedule_gives_the_bits_of_the_plain_loop(devices: int, half: str, launch: Launch) -> None:
    launch(sampled, devices, half)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_schedule_gives_the_bits_of_the_plain_loop_on_eight_ranks(launch: Launch) -> None:
    launch(sampled, 8, "0", "1", timeout=500)


# -- what crosses ------------------------------------------------------------------------------------------------------


def exact(
    mesh: DeviceMesh, model: Any, data: Sequence[Any], loss: Any = F.mse_loss, *, shared: bool = True, **options: Any
) -> None:
    """Steps without zero_grad over these batches, against the plain loop; without `shared` memory, as between hosts."""
    reference = copy.deepcopy(model)
    asked: dict[str, Any] = {"microbatches": 4, "seed": SEED, **options}
    with gapless.Pipeline(model, mesh=mesh, loss=loss, **asked) as pipe:
        links: Any = pipe._world.links  # type: ignore[attr-defined]
        pipes, _ = links.carriers
        assert pipes.near  # all ranks are on one host
        pipes.near = pipes.near if shared else {}
        plain_options = {key: value for key, value in asked.items() if key in ("microbatches", "seed", "loss_weight")}
        for number, (inputs, target) in enumerate(data):
            ours = pipe.step(inputs, target, outputs=True)
            plain = gapless.plain_step(reference, inputs, target, loss=loss, step=number, **plain_options)
            assert_same(ours.loss, plain.loss, f"step {number}, loss")
            if pipe._staged.has_last:
                assert_same(ours.outputs, plain.outputs, f"step {number}, outputs")
            names = dict(reference.named_parameters())
            for name, parameter in pipe.named_parameters():
                assert (parameter.grad is None) == (names[name].grad is None), name
                if parameter.grad is not None:
                    assert_same(parameter.grad, names[name].grad, f"step {number}, {name}")


def crossing() -> None:
    mesh = line()
    torch.manual_seed(1)
    # shapes that change from step to step, and grow beyond what was posted
    widths = (3, 2000, 1, 30000, 5, 30000, 7)
    grow = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    data = [(torch.randn(8, width, 1), torch.randn(8, width, 1)) for width in widths]
    for shared in (True, False):
        exact(mesh, copy.deepcopy(grow), data, schedule="1f1b", shared=shared)
        exact(mesh, copy.deepcopy(grow), data, schedule="zb-h1", shared=shared)
    # dicts, constants, nothing at all
    ids = torch.randint(5, (8,))
    exact(mesh, dicts(8), [((torch.randn(8, 6), ids), torch.randn(8, 6)) for _ in range(2)], schedule="zb-h1")
    # layouts: a transposed tensor, an expanded one, one of every second column
    layouts = nn.Sequential(
        nn.Linear(6, 6),
        Do(lambda x: {"t": x.t(), "e": x[:1].expand(3, 6), "s": torch.cat([x, x], 1)[:, ::2], "y": x[:, 0] > 0}),
        Do(lambda s: {**s, "t": s["t"] * 2} if s["t"].stride() == (1, 6) and s["e"].stride(0) == 0 else None),
        Do(lambda s: s["t"].t() + s["e"].sum(0) + s["s"] * s["y"][:, None]),
        nn.Linear(6, 6),
    )
    exact(mesh, layouts, [(torch.randn(8, 6), torch.randn(8, 6)) for _ in range(2)])
    # fewer samples than microbatches, then again as many
    exact(mesh, mlp(8), [(torch.randn(n, 6), torch.randn(n, 6)) for n in (9, 2, 8, 1)], schedule="zb-h1")


def test_shapes_change_and_any_tree_crosses(launch: Launch) -> None:
    launch(crossing, 2)


class ApartWriter(Writer):
    def _message(self, layout: TreeLayout, number: int, description: bytes) -> Message:
        return Message(layout, number, description, apart=torch.empty(layout.size, dtype=torch.uint8))


class ApartOutgoing(GlooOutgoing):
    def __init__(self, courier: Any, target: int, kind: str, group: Any) -> None:
        super().__init__(courier, target, kind, ApartWriter())
        self._group, self._kept = group, list[Any]()

    def send(self, item: Any, stamp: bytes | None = None) -> None:
        message = self._writer.write(item)
        message.mark(stamp or self.courier.stamp.now)
        self.post(message)
        assert message.apart is not None
        if message.apart.numel():
            self._kept.append((self._group.send([message.apart], self._target, 0), message.apart))


class ApartReader(Reader):
    def __init__(self, group: Any, source: int) -> None:
        super().__init__()
        self._group, self._source = group, source

    def _data(self, buffer: Tensor, start: int, elsewhere: int, size: int) -> tuple[Tensor, int]:
        data = torch.empty(size, dtype=torch.uint8)
        if size:
            self._group.recv([data], self._source, 0).wait()
        return data, 0


class CarriedApart(OverGloo):
    """Tensors leave their messages, as with NCCL, but stay on the CPU."""

    def __init__(self, links: Any, groups: dict[tuple[int, str], Any]) -> None:
        super().__init__(links.courier, links.waiting)
        self._groups = groups

    def outgoing(self, target: int, kind: str) -> Outgoing:
        return ApartOutgoing(self._courier, target, kind, self._groups[1 - target, kind])

    def incoming(self, source: int, kind: str) -> Incoming:
        reader = ApartReader(self._groups[source, kind], source)
        return GlooIncoming(self._courier, self._waiting, source, kind, reader)


def own_way() -> None:
    """The messages tell what comes, and the tensors go through a group of two ranks for each channel."""
    mesh, network = line(), network_device()
    groups = {
        (source, kind): connected(f"{kind} {source}", [0, 1], dist.get_rank(), network)
        for kind in ("activation", "gradient", "loss", "tied 0", "total 0")
        for source in (0, 1)
    }
    torch.manual_seed(1)
    for make, schedule in ((mlp, "zb-v"), (dicts, "1f1b"), (tied_layers, "zb-h1")):
        model = make()
        reference = copy.deepcopy(model)
        loss = logits_loss if make is tied_layers else F.mse_loss
        with gapless.Pipeline(
            model, mesh=mesh, microbatches=4, loss=loss, seed=SEED, schedule=schedule, tied="exact"
        ) as pipe:
            links: Any = pipe._world.links  # type: ignore[attr-defined]
            links.carriers = [*links.carriers[:-1], CarriedApart(links, groups)]
            links.carriers[0].near = {}
            for number in range(3):
                x, y = (torch.randn(8, 6), torch.randint(5, (8,))), torch.randn(8, 6)
                inputs: Any = x if make is dicts else x[0]
                if make is tied_layers:
                    inputs, y = tokens(8, length=number + 2)
                ours = pipe.step(inputs, y)
                plain = gapless.plain_step(reference, inputs, y, loss=loss, microbatches=4, seed=SEED, step=number)
                assert_same(ours.loss, plain.loss, "loss")
                names = dict(reference.named_parameters())
                for name, parameter in pipe.named_parameters():
                    assert_same(parameter.grad, names[name].grad, name)


def test_tensors_may_go_another_way_than_their_messages(launch: Launch) -> None:
    launch(own_way, 2)


# -- tied models ---------------------------------------------------------------------------------------------------


class TiedGpt(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Any:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.norm(x))


def logits_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def tied_layers() -> nn.Sequential:
    whole = TiedGpt()
    return nn.Sequential(
        whole.embedding, *(nn.Sequential(block, nn.Tanh()) for block in whole.blocks), nn.Tanh(), whole.norm, whole.head
    )


def tied_models() -> None:
    mesh = line()
    torch.manual_seed(2)
    data = [tokens(8) for _ in range(3)]
    for schedule in ("1f1b", "zb-h1", "gpipe"):
        exact(mesh, tied_layers(), data, logits_loss, schedule=schedule, tied="exact")
    exact(mesh, tied_layers(), data, logits_loss, schedule="zb-v", tied="exact", stages_per_device=2)
    _summed(mesh, data)


def _summed(mesh: DeviceMesh, data: Any) -> None:
    """The default: the same bits on all ranks that hold the parameter, and those of one process with summed."""
    model = tied_layers()
    other = copy.deepcopy(model)
    with (
        gapless.Pipeline(model, mesh=mesh, loss=logits_loss, microbatches=4, seed=SEED) as pipe,
        gapless.Pipeline(
            other, devices=["cpu"] * mesh.size(), loss=logits_loss, microbatches=4, seed=SEED, tied="summed"
        ) as threads,
    ):
        for inputs, target in data:
            pipe.step(inputs, target)
            threads.step(inputs, target)
            names = dict(other.named_parameters())
            for name, parameter in pipe.named_parameters():
                assert_same(parameter.grad, names[name].grad, f"summed, {name}")


@pytest.mark.parametrize("devices", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_tied_models_give_the_bits_of_the_plain_loop(devices: int, launch: Launch) -> None:
    launch(tied_models, devices)


# -- the life of a model in parts --------------------------------------------------------------------------------------


def parts_of_a_model() -> None:
    mesh = line()
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x, y = torch.randn(9, 6), torch.randn(9, 6)
    torch.manual_seed(4)
    plain = nn.Sequential(*mlp(8), nn.BatchNorm1d(6))
    gapless.plain_step(plain, x, y, loss=F.mse_loss, microbatches=4, seed=SEED)
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    torch.manual_seed(4)
    model = nn.Sequential(*mlp(8), nn.BatchNorm1d(6))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with gapless.Pipeline(model, mesh=mesh, microbatches=4, loss=F.mse_loss, seed=SEED, timeline=True) as pipe:
        result = pipe.step(x, y)
        assert_same(pipe.clip_grad_norm_(0.05), norm, "norm")
        names = dict(plain.named_parameters())
        for name, parameter in pipe.named_parameters():
            assert_same(parameter.grad, names[name].grad, name)
        # only what is needed here has data
        held = {name for name, _ in pipe.named_parameters()}
        assert {name for name, each in model.named_parameters() if not each.is_meta} == held
        # the timeline of all devices
        timeline = result.timeline
        assert timeline is not None
        assert timeline.schedule == pipe.schedule
        assert [len(row) for row in timeline.starts] == [len(row) for row in pipe.schedule.rows]
        assert all(busy > 0 for busy in timeline.busy)
        for device, row in enumerate(pipe.schedule.rows):
            for place, action in enumerate(row):
                for need in gapless.schedule.dependencies.dependencies(action, pipe.schedule):
                    home = pipe.schedule.placement.device(need.stage, need.microbatch)
                    there = [i for i, a in enumerate(pipe.schedule.rows[home]) if a == need]
                    assert all(timeline.starts[home][i] <= timeline.starts[device][place] + 1e-3 for i in there)
        # evaluation: outputs where they are made, the loss everywhere
        found = pipe.evaluate(x, y)
        plain.eval()
        with torch.no_grad():
            outputs = [plain(part) for part in x.tensor_split(4)]
        losses = tuple(F.mse_loss(out, goal) for out, goal in zip(outputs, y.tensor_split(4), strict=True))
        assert_same(found.losses, losses, "losses")
        assert (found.outputs is not None) == (rank == last)
        if rank == last:
            assert_same(found.outputs, torch.cat(outputs), "outputs")
        assert pipe.evaluate(x).loss is None
        # the state, whole and in part
        state = pipe.state_dict()
        assert_same(list(state.values()), [value.detach() for value in plain.state_dict().values()], "state")
        assert list(state) == list(before)
        assert set(pipe.state_dict(whole=False)) <= set(before)
        pipe.load_state_dict(before)
        again = pipe.state_dict()
        assert_same(list(again.values()), list(before.values()), "loaded")
        pipe.load_state_dict(pipe.state_dict(whole=False))
        with pytest.raises(RuntimeError, match="unexpected keys"):
            pipe.load_state_dict({**before, "more": torch.zeros(1)})
        assert "stage 0 on device 0" in repr(pipe)
        with pytest.raises(gapless.GaplessError, match="GradScaler"):
            pipe.step(x, y, scaler=object())
    _meta(mesh)
    _without_parameters(mesh)
    _shared_buffers(mesh)


def _meta(mesh: DeviceMesh) -> None:
    """A model on the meta device is filled a stage at a time, and never whole."""
    torch.manual_seed(4)
    values = mlp(8).state_dict()
    with torch.device("meta"):
        model = mlp(8)
    with gapless.Pipeline(model, mesh=mesh, microbatches=4, loss=F.mse_loss, init=values) as pipe:
        held = {name for name, _ in pipe.named_parameters()}
        assert {name for name, each in model.named_parameters() if not each.is_meta} == held
        assert_same(list(pipe.state_dict().values()), list(values.values()), "state")
        assert pipe.step(torch.randn(8, 6), torch.randn(8, 6)).loss is not None


def _without_parameters(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(6, 6), *(nn.Tanh() for _ in range(mesh.size() - 1)))
    with gapless.Pipeline(model, mesh=mesh, microbatches=2, loss=F.mse_loss, partition=[1] * mesh.size()) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        pipe.step(torch.randn(4, 6), torch.randn(4, 6))
        optimizer.step()
        optimizer.zero_grad()
        pipe.clip_grad_norm_(1.0)


def _shared_buffers(mesh: DeviceMesh) -> None:
    """Buffers that stages of several ranks have were loaded on the first of these alone."""
    norm, x = nn.BatchNorm1d(6, affine=False), torch.randn(4, 6)
    model = nn.Sequential(norm, *mlp(8), norm)
    plain = copy.deepcopy(model).eval()
    plain[0].running_mean.copy_(torch.arange(6.0))  # type: ignore[operator]
    with gapless.Pipeline(model, mesh=mesh, microbatches=1, loss=F.mse_loss) as pipe:
        pipe.load_state_dict(plain.state_dict())
        assert_same(pipe.evaluate(x, x).loss, F.mse_loss(plain(x), x).detach(), "loss")
    model = nn.Sequential(*mlp(2), nn.BatchNorm1d(6, affine=False))
    plain = copy.deepcopy(model).eval()
    plain[-1].running_mean.copy_(torch.arange(6.0))  # type: ignore[operator]
    layers: list[Any] = [*list(model)[:-1], lambda x: x - model[-1].running_mean]  # which is in the last stage
    with gapless.Pipeline(model, layers=layers, mesh=mesh, microbatches=1, loss=F.mse_loss) as pipe:
        pipe.load_state_dict(plain.state_dict())
        expected = F.mse_loss(plain[:-1](x) - torch.arange(6.0), x)
        assert_same(pipe.evaluate(x, x).loss, expected.detach(), "loss of a function")


def test_each_rank_holds_its_part_of_the_model(launch: Launch) -> None:
    launch(parts_of_a_model, 3)


# -- replicas ----------------------------------------------------------------------------------------------------------


def replicas() -> None:
    """Two replicas: the sum of what plain loops over each half give, each with its microbatches' seeds and weights."""
    ranks = dist.get_world_size()
    dp_first = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "pp"))
    pp_first = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("pp", "dp"))
    _replicas(dp_first, "1f1b", (8, 8))
    _replicas(pp_first, "zb-h1", (9, 4))
    _replicas(dp_first, "zb-v", (8, 2))
    _replicas(pp_first, "1f1b", (8, 8), tied_layers, tokens, logits_loss, tied="exact")
    _replicas(dp_first, "zb-h1", (8, 8), tied_layers, tokens, logits_loss, exact=False)


def _samples(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 6), torch.randn(count, 6)


def _replicas(
    mesh: DeviceMesh,
    schedule: str,
    sizes: tuple[int, int],
    make: Callable[[], nn.Sequential] = lambda: mlp(8, dropout=0.3),
    batch: Callable[[int], tuple[Tensor, Tensor]] = _samples,
    loss: Any = F.mse_loss,
    exact: bool = True,
    **options: Any,
) -> None:
    replica = mesh.get_local_rank("dp")
    torch.manual_seed(6)
    whole = make()
    halves = [copy.deepcopy(whole) for _ in sizes]
    total = copy.deepcopy(whole)
    torch.manual_seed(7 + dist.get_rank())
    model = make() if replica else copy.deepcopy(whole)  # replicas start with the first one's values
    with gapless.Pipeline(model, mesh=mesh, schedule=schedule, microbatches=4, loss=loss, seed=SEED, **options) as pipe:
        for step in range(3):
            torch.manual_seed(20 + step)
            data = [batch(size) for size in sizes]
            result = pipe.step(*data[replica])
            losses = []
            for number, (half, (x, y)) in enumerate(zip(halves, data, strict=True)):
                half.zero_grad()
                losses += _plain(half, x, y, loss, step, number * 4, sum(sizes))
            assert_same(result.losses, tuple(value for value, _ in losses), "losses")
            assert result.weights == tuple(weight for _, weight in losses)
            first, second = (dict(half.named_parameters()) for half in halves)
            for name, parameter in total.named_parameters():
                added = first[name].grad + second[name].grad  # type: ignore[operator]
                parameter.grad = added if parameter.grad is None else parameter.grad + added
            names = dict(total.named_parameters())
            for name, parameter in pipe.named_parameters():
                assert parameter.grad is not None
                if exact:
                    assert_same(parameter.grad, names[name].grad, f"{schedule} {sizes}, step {step}, {name}")
                else:
                    torch.testing.assert_close(parameter.grad, names[name].grad)


def _plain(
    model: nn.Sequential, x: Tensor, y: Tensor, loss: Any, step: int, first: int, samples: int
) -> list[tuple[Tensor, float]]:
    """The plain loop over one replica's microbatches, numbered from `first`: their losses and shares."""
    count = min(4, len(x))
    place: dict[str, Any] = {"microbatches": count, "seed": SEED, "step": step, "first": first, "samples": samples}
    losses = seeded_loop(model, x, y, loss=loss, **place)
    return [(found, len(part) / samples) for found, part in zip(losses, x.tensor_split(count), strict=True)]


def test_replicas_add_up_to_the_plain_loop(launch: Launch) -> None:
    launch(replicas, 4)


# -- as users start it -------------------------------------------------------------------------------------------------

SCRIPT = """
import torch, torch.distributed as dist, torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
import gapless

torch.set_num_threads(1)
torch.manual_seed(1)
model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
x, y = torch.randn(8, 4), torch.randn(8, 4)
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
pipe = gapless.Pipeline(model, mesh=mesh, schedule="zb-v", microbatches=4, loss=F.mse_loss)
optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
for _ in range(3):
    result = pipe.step(x, y)
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {result.loss.item():.6f}", flush=True)
dist.destroy_process_group()
"""


def script() -> None:
    exec(compile(SCRIPT, "train.py", "exec"), {"__name__": "__main__"})


def test_a_script_has_the_loss_on_every_rank(server: Server, tmp_path: Path) -> None:
    """It neither closes the pipeline nor knows its rank."""
    with server.crew(script, 2, folder=tmp_path) as crew:
        assert set(crew.ended().values()) == {0}, crew.everything()
        for rank in range(2):
            assert crew.said(rank) == f"loss {loss_of_script():.6f}\n"


@pytest.mark.slow
def test_a_script_under_torchrun_has_the_loss_on_every_rank(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(f'import torch.distributed as dist\ndist.init_process_group("gloo")\n{SCRIPT}')
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)]
    run = subprocess.run(torchrun, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    said = re.findall(r"loss \d+\.\d{6}", run.stdout)  # the lines of two processes may run into one
    assert said == [f"loss {loss_of_script():.6f}"] * 2


def loss_of_script() -> float:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = gapless.plain_step(model, x, y, loss=F.mse_loss, microbatches=4, step=step).loss
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()
