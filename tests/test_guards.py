"""Every guard speaks: for each row of the table the smallest thing that it refuses.

What a guard must notice, and what it must let pass, the tests of its own file say. Here it only has to say who it is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import gapless
from gapless.errors import GaplessError
from gapless.guards import batches_and_losses as batches
from gapless.guards import between_ranks as ranks
from gapless.guards import held_state as state
from gapless.guards import passed_tensors as passed
from gapless.guards import process_wide as process
from gapless.guards import weights_and_gradients as weights
from gapless.guards import whole_model as model
from gapless.guards.guard import Guard
from gapless.guards.table import GUARDS
from gapless.run.ranks.wire.static_shapes import StaticShapes
from gapless.schedule.action import Schedule
from gapless.stage.stage import Stage
from tests.hf.test_pipeline_trainer import Changed
from tests.hf.training import arguments, trained
from tests.model.hub import gpt2
from tests.pipelines import Do, Own
from tests.run.forked import Launch
from tests.run.ranks.watch.test_watch import pipeline as on_ranks
from tests.stage.batch.test_view_bases import _before_and_after
from tests.stage.guards.state.test_held_objects import counter_twice
from tests.stage.guards.test_changing_buffers import InCheckpoint, norm_twice
from tests.stage.guards.test_data_writes import Changing, _adds_a_local_loss, _shrinks
from tests.stage.guards.test_forward_restart import Both, Learner, gradient_inside, unseen_draw
from tests.stage.guards.test_grad_fields import WHEN, flipped, read
from tests.stage.guards.test_stored_tensors import Keeps, sequence
from tests.stage.guards.test_weight_changes import stepped
from tests.stage.state_loops import Clock, linear
from tests.stage.test_batchnorm import Checkpointed

CASES: dict[str, Callable[[], object]] = {}
ON_RANKS: dict[str, Callable[[], object]] = {}
ON_GPUS = {passed.CAPTURED_ACTIONS.name: "CUDA graphs"}  # it warns, and goes on without them


def case(guard: Guard, cases: dict[str, Callable[[], object]] = CASES) -> Callable[[Callable[[], object]], None]:
    """What follows makes this guard speak."""

    def add(function: Callable[[], object]) -> None:
        cases[guard.name] = function

    return add


@pytest.mark.parametrize("name", CASES)
def test_a_guard_says_who_it_is(name: str) -> None:
    with pytest.raises(GaplessError) as caught:
        CASES[name]()
    assert caught.value.guard == name


@pytest.mark.parametrize("name", ON_RANKS)
def test_so_it_does_on_every_rank(name: str, launch: Launch) -> None:
    launch(speaks, 2, name)


def speaks(name: str) -> None:
    with pytest.raises(GaplessError) as caught:
        ON_RANKS[name]()
    assert caught.value.guard == name


def test_every_guard_has_a_case_and_a_name_of_its_own() -> None:
    names = [guard.name for group in GUARDS.values() for guard in group]
    assert len(names) == len(set(names))
    assert {*names} == {*CASES, *ON_RANKS, *ON_GPUS}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, since graphs are CUDA's")
def test_a_stage_that_is_not_captured_says_so() -> None:
    with pytest.warns(UserWarning, match="stage 0 runs without CUDA graphs: its BatchNorm1d counts what it sees"):
        step(
            [nn.BatchNorm1d(6), linear()],
            x=torch.randn(8, 6).cuda(),
            y=torch.randn(8, 6).cuda(),
            devices=["cuda:0"] * 2,
            graphs=True,
        )


def test_an_argument_that_makes_no_sense_is_no_guards_matter() -> None:
    with pytest.raises(GaplessError) as caught:
        gapless.Pipeline([linear()], devices=0, microbatches=1)
    assert caught.value.guard == ""


def step(made: Any, loss: Any = F.mse_loss, *, x: Any = None, y: Any = None, steps: int = 1, **options: Any) -> None:
    options = {"devices": 2, "microbatches": 4, "intra_op_threads": 1, **options}
    x = torch.randn(8, 6) if x is None else x
    with gapless.Pipeline(made, loss=loss, **options) as pipe:
        for _ in range(steps):
            pipe.step(x, torch.randn(8, 6) if y is None else y)


def stream(layers: Any, change: Callable[[Any], object] = lambda _: None, x: Tensor | None = None) -> None:
    """Some minibatches, a change, and some more."""
    data = [(torch.randn(4, 6) if x is None else x, torch.randn(4, 6))] * 3
    with gapless.Pipeline(layers, devices=2, schedule="pipedream", microbatches=1, loss=F.mse_loss) as pipe:
        made = pipe.stream(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
        for _ in range(2):
            list(made.run(data))
            made.drain()
            change(pipe)


# -- what layers hold --------------------------------------------------------------------------------------------------


@case(state.STORED_TENSORS)
def _() -> None:
    layers = sequence("detached")
    kept = [each for each in layers if isinstance(each, Keeps)]
    step(layers, lambda out, y: F.mse_loss(out, y) + kept[0].aux, x=torch.randn(8, kept[0].linear.in_features))


@case(state.SHARED_STATE)
def _() -> None:
    step(counter_twice(Clock(), 0))


@case(state.RESTARTED_FORWARDS)
def _() -> None:
    stage = Stage([Both(gradient_inside, 5)], first_layer=0, split=True)
    for number in range(6):
        stage.forward(number, torch.randn(2, 6, requires_grad=True), step=0)


@case(state.RECOMPUTED_STATE)
def _() -> None:
    step([InCheckpoint(), linear()])


@case(state.SHARED_BUFFERS)
def _() -> None:
    step(norm_twice())


@case(state.FORWARD_ORDER)
def _() -> None:
    schedule = Schedule.parse("0: 0F1 0F0 0B1 0B0\n1: 1F1 1F0 1B1 1B0")
    step([linear(), nn.BatchNorm1d(6), linear()], schedule=schedule, microbatches=2, partition=[2, 1])


@case(state.CHECKPOINTED_NORMS)
def _() -> None:
    norm = nn.BatchNorm1d(6)
    step([linear(), Checkpointed(norm, linear(), norm)])


# -- the process -------------------------------------------------------------------------------------------------------


@case(process.UNSEEN_DRAWS)
def _() -> None:
    stage = Stage([Learner(unseen_draw, 2), nn.BatchNorm1d(6)], first_layer=0)
    for number in range(3):
        stage.forward(number, torch.randn(4, 6), step=0)


@case(process.BACKWARD_DRAWS)
def _() -> None:
    def hooked(part: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = part(x)
        made.register_hook(lambda grad: grad * torch.rand_like(grad))
        return made

    step([linear(), Do(hooked, linear())])


@case(process.SHARED_GENERATORS)
def _() -> None:
    own = torch.Generator()
    step([Do(lambda part, x: part(x) * torch.rand(6, generator=own), linear()) for _ in range(2)])


@case(process.COMPILED_DRAWS)
def _() -> None:
    def noisy(outputs: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(F.dropout(outputs), target)

    step([linear(), linear()], torch.compile(noisy, backend="aot_eager"))


@case(process.PROCESS_SETTINGS)
def _() -> None:
    def sets(part: nn.Module, x: Tensor) -> Any:
        torch.set_flush_denormal(False)
        return part(x)

    step([linear(), Do(sets, linear())])


@case(process.CALLERS_MODES)
def _() -> None:
    with torch.autograd.graph.save_on_cpu():
        step([linear(), linear()])


@case(process.GRAD_MODE)
def _() -> None:
    def switches(part: nn.Module, x: Tensor) -> Any:
        torch.set_grad_enabled(False)
        return part(x)

    step([linear(), Do(switches, linear())])


# -- weights and gradients ---------------------------------------------------------------------------------------------


@case(weights.NOTHING_TO_TRAIN)
def _() -> None:
    step([linear().requires_grad_(False), linear().requires_grad_(False)])


@case(weights.FORWARD_WEIGHTS)
def _() -> None:
    step([nn.Embedding(10, 6, max_norm=1.0), linear()], x=torch.randint(10, (8,)), remat="stage")


@case(weights.SAVED_TENSORS)
def _() -> None:
    step([linear(), Changing(_shrinks)], schedule="gpipe")


@case(weights.BACKWARD_WEIGHTS)
def _() -> None:
    layers = nn.Sequential(linear(), linear())
    stepped(layers)
    step(layers)


@case(weights.FORWARD_GRADS)
def _() -> None:
    step(*read(Clock(), WHEN["always"]))


@case(weights.FROZEN_WEIGHTS)
def _() -> None:
    step(*flipped(Clock(), WHEN["always"]))


@case(weights.FORWARD_BACKWARDS)
def _() -> None:
    step([Changing(_adds_a_local_loss), linear()])


@case(weights.LOOSE_TENSORS)
def _() -> None:
    loose = torch.ones(6, requires_grad=True)
    step([lambda x: x * loose, lambda x: x + loose])


@case(weights.WEIGHTS_ELSEWHERE)
def _() -> None:
    first = linear()
    stream([first, Do(lambda part, x: part(x) * first.weight.mean(), linear())])


@case(weights.SECOND_USES)
def _() -> None:
    def sometimes(part: nn.Linear, x: Tensor) -> Tensor:
        return part(x) * part.weight.mean() if x[0, 0] > 0 else part(x)  # type: ignore[no-any-return]

    hooked = linear()
    hooked.weight.register_hook(lambda grad: grad)
    step([linear(), Do(sometimes, hooked)], schedule="zb-h1", steps=5)


@case(weights.GRADIENT_HOOKS)
def _() -> None:
    shared = linear()
    shared.weight.register_hook(lambda grad: grad)
    step([shared, nn.Tanh(), shared])


@case(weights.TIED_GRADIENTS)
def _() -> None:
    def twice(part: nn.Module, x: Tensor) -> Any:
        return checkpoint(part, checkpoint(part, x, use_reentrant=True), use_reentrant=True)

    shared = linear()
    step([shared, nn.Tanh(), Do(twice, shared), linear()], partition=[2, 2])


@case(weights.NOT_FINITE)
def _() -> None:
    stream([linear(), linear()], x=torch.full((4, 6), torch.nan))


# -- tensors between layers --------------------------------------------------------------------------------------------


@case(passed.SHARED_MEMORY)
def _() -> None:
    def hand_on(part: nn.Module, x: Tensor) -> Any:
        made = part(x)
        return made, made.detach().view(torch.int32)

    step([Do(hand_on, linear()), Do(lambda part, pair: part(pair[0]), linear())])


@case(passed.CHANGED_VIEWS)
def _() -> None:
    viewed = Do(lambda part, x: part(x).view_as(x), linear())  # as nn.Linear's own result is before torch 2.15
    step([viewed, Do(_before_and_after, linear())], x=torch.randn(8, 4, 6), y=torch.randn(8, 4, 6))


@case(passed.CHANGED_INPUTS)
def _() -> None:
    calls = iter(range(100))
    late = Do(lambda part, x: part(x.mul_(0.5) if next(calls) > 8 else x), linear())
    with torch.autocast("cpu", torch.bfloat16):
        step([linear(), late], steps=4)


# -- batches and losses ------------------------------------------------------------------------------------------------


@case(batches.CUT_BATCHES)
def _() -> None:
    step([linear(), linear()], y=torch.randn(2, 6))


@case(batches.LOSS_COUNTS)
def _() -> None:
    target = torch.tensor([-100, 1, 1, 1, 1, 1, 1, 1])
    step([linear(), linear()], lambda out, y: F.cross_entropy(out, y), y=target)


@case(batches.LOSS_DIVISORS)
def _() -> None:
    target = torch.tensor([0, 1, 1, 1, 1, 1, 1, 1])
    step([linear(), linear()], lambda out, y: F.cross_entropy(out, y, ignore_index=0), y=target)


@case(batches.FETCHED_BATCHES)
def _() -> None:
    from gapless.hf import PipelineTrainer

    with tempfile.TemporaryDirectory() as folder:
        trained(type("Own", (Changed, PipelineTrainer), {}), gpt2(), arguments(Path(folder)), devices=2)


@case(batches.RESUMED_DATA)
def _() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(2):
            with gapless.Pipeline([linear(), linear()], devices=2, microbatches=2, loss=F.mse_loss, seed=seed) as pipe:
                optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
                (pipe.load if seed else pipe.save)(Path(folder, "saved"), optimizer)


# -- the model ---------------------------------------------------------------------------------------------------------


def traced(forward: Callable[[Any, Tensor], Any]) -> nn.Module:
    return Own(forward, first=linear(), last=linear(), calls=0)


@case(model.LOST_IN_TRACE)
def _() -> None:
    def hooked(part: Any, x: Tensor) -> Any:
        made = part.first(x)
        made.register_hook(lambda grad: grad * 2)
        return part.last(made)

    step(traced(hooked))


@case(model.TRACED_STATE)
def _() -> None:
    def counted(part: Any, x: Tensor) -> Any:
        part.calls += 1
        return part.last(part.first(x) * part.calls)

    step(traced(counted))


@case(model.MODEL_EDITS)
def _() -> None:
    layers = nn.Sequential(linear(), linear())
    with gapless.Pipeline(layers, devices=2, microbatches=2, loss=F.mse_loss) as pipe:
        layers.register_forward_hook(lambda *_: None)
        pipe.step(torch.randn(8, 6), torch.randn(8, 6))


@case(model.IGNORED_HOOKS)
def _() -> None:
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        step(nn.Sequential(linear(), linear()))
    finally:
        hook.remove()


@case(model.LEFT_OUT_PARAMETERS)
def _() -> None:
    step(nn.Sequential(linear(), linear()), layers=[linear(), linear()])


@case(model.EMPTY_WEIGHTS)
def _() -> None:
    with torch.device("meta"):
        layers = nn.Sequential(linear(), linear())
    step(layers, init=lambda module, name: None)


# -- ranks and streams -------------------------------------------------------------------------------------------------


@case(ranks.SAME_CALLS, ON_RANKS)
def _() -> None:
    on_ranks([linear(), linear()], microbatches=2 + dist.get_rank())


@case(ranks.SAME_WEIGHTS, ON_RANKS)
def _() -> None:
    torch.manual_seed(dist.get_rank())
    with on_ranks([linear(), linear()]) as pipe:
        pipe.step(torch.ones(16, 6), torch.ones(16, 6))


@case(ranks.SAME_BATCHES, ON_RANKS)
def _() -> None:
    torch.manual_seed(0)
    with on_ranks([linear(), linear()]) as pipe:
        torch.manual_seed(dist.get_rank())
        pipe.step(torch.randn(16, 6), torch.randn(16, 6))


@case(ranks.UNEXCHANGED_GRADIENTS, ON_RANKS)
def _() -> None:
    torch.manual_seed(0)
    with on_ranks([linear()], mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))) as pipe:
        pipe.step(torch.randn(16, 6), torch.randn(16, 6), sync=False)
        pipe.clip_grad_norm_(1.0)


@case(ranks.TENSORS_ELSEWHERE, ON_RANKS)
def _() -> None:
    torch.manual_seed(0)
    made = nn.Sequential(linear(), linear(), nn.BatchNorm1d(6), nn.BatchNorm1d(6))
    layers: list[Any] = [made[0], lambda x, norm=made[2]: norm(x), made[1], lambda x, norm=made[3]: norm(x)]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    with gapless.Pipeline(made, layers=layers, mesh=mesh, microbatches=2, loss=F.mse_loss, partition=[2, 2]) as pipe:
        pipe.step(torch.randn(4, 6), torch.randn(4, 6))


@case(ranks.PARTIAL_STATE, ON_RANKS)
def _() -> None:
    torch.manual_seed(0)
    made = traced(lambda part, x: part.last(torch.tanh(part.first(x))))
    with on_ranks(made) as pipe:
        pipe.step(torch.randn(16, 6), torch.randn(16, 6))
        whole = pipe.state_dict()
        assert [*whole] == [*made.state_dict(keep_vars=True)]
    made.load_state_dict(whole)
    assert all(torch.equal(each, whole[name]) for name, each in made.state_dict().items())
    with on_ranks(made) as pipe:
        pipe.step(torch.randn(16, 6), torch.randn(16, 6))
        made.state_dict()


@case(ranks.NORM_OF_A_PART, ON_RANKS)
def _() -> None:
    torch.manual_seed(0)
    with on_ranks([linear(), linear()]) as pipe:
        torch.manual_seed(0)
        pipe.step(torch.randn(16, 6), torch.randn(16, 6))
        norms = [pipe.clip_grad_norm_(10.0), *(each.grad.norm() for each in pipe.parameters() if each.grad is not None)]
        assert all(each < norms[0] for each in norms[1:])
        other = linear()
        other(torch.randn(2, 6)).sum().backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)  # which is no pipeline's
        torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)


@case(ranks.OPTIMIZER_OF_A_PART, ON_RANKS)
def _() -> None:
    torch.manual_seed(0)
    x, other = torch.randn(16, 6), linear()
    torch.optim.LBFGS(other.parameters()).step(lambda: float(other(x).sum()))  # which is no pipeline's
    with on_ranks([linear(), linear()]) as pipe:
        optimizer = torch.optim.LBFGS(pipe.parameters())
        optimizer.step(lambda: float(pipe.step(x, x).loss or 0))


@case(ranks.STREAM_ENDS, ON_RANKS)
def _() -> None:
    torch.manual_seed(0)
    with on_ranks([linear(), linear()], schedule="pipedream", microbatches=1) as pipe:
        data = [(torch.randn(4, 6), torch.randn(4, 6)) for _ in range(9)]
        with pipe.stream(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01)) as made:
            list(made.run(data[: 6 + 3 * dist.get_rank()]))


@case(ranks.STATIC_SHAPES)
def _() -> None:
    def ask(fault: GaplessError | None, ready: int) -> int:
        if fault is not None:
            raise fault
        return ready

    shapes = StaticShapes()
    for samples in (4, 6):
        shapes.agreed(step, torch.randn(samples, 6), None, ask, rehearsed=True, follows=True)


@case(ranks.STREAM_WEIGHTS)
def _() -> None:
    def change(pipe: gapless.Pipeline) -> None:
        with torch.no_grad():
            next(iter(pipe.parameters())).add_(1)

    stream([linear(), linear()], change)


@case(ranks.STREAM_CASTS)
def _() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        stream([linear(), linear()])
