"""When a step fails, the model, its optimizer and its buffers are those of the last settled step."""

import os
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gapless
from gapless.errors import TransportError
from tests.pipelines import Do
from tests.run.forked import Launch
from tests.run.overlap.plain_training import Run, plain


def trip(x: Tensor) -> Tensor:
    """Raises for inputs that are not numbers."""
    if bool(x.detach().isnan().any()):
        raise ValueError("not a number")
    return x


def state_after(run: Run, steps: int) -> dict[str, Tensor]:
    model = run.model()
    found = plain(run, steps) if steps else None
    return model.state_dict() if found is None else found.states[-1]


def train(training: Any, batches: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in batches:
        training.step(x, y)
    training.settle()


@pytest.mark.parametrize(("schedule", "place"), [("zb-h2", 0), ("gpipe", 15), ("zb-v", 7)])
def test_a_layer_that_raises_leaves_the_last_settled_step(schedule: str, place: int) -> None:
    run = Run(3, schedule=schedule, norms=True, large=(2, 5), max_norm=1.0)
    layers = [*run.model()]
    layers.insert(place, Do(trip))
    model = nn.Sequential(*layers)
    with gapless.Pipeline(model, devices=4, schedule=schedule, microbatches=4, loss=F.mse_loss) as pipe:
        optimizer, scheduler = run.optimizer_of(pipe.parameters())
        training = pipe.training(optimizer, max_norm=1.0, scheduler=scheduler)
        for step in range(6):
            training.step(*run.batch(step))
        x, y = run.batch(6)
        x[3] = float("nan")
        with pytest.raises(ValueError, match="not a number") as raised:
            train(training, [(x, y)])
        settled = pipe.steps
        assert settled in (5, 6)
        assert any(f"as before step {settled}" in note for note in raised.value.__notes__)
        state, wanted = pipe.state_dict(), [*state_after(run, settled).values()]
        assert all(map(torch.equal, state.values(), wanted))
        for step in range(settled, 9):
            training.step(*run.batch(step))
        assert all(map(torch.equal, pipe.state_dict().values(), state_after(run, 9).values()))
        assert scheduler.last_epoch == 9


def test_ctrl_c_in_a_step_leaves_the_last_settled_step() -> None:
    run = Run(4, schedule="zb-h2")

    class Slow(nn.Module):
        interrupts = False

        def forward(self, x: Tensor) -> Tensor:
            if self.interrupts and threading.current_thread() is not threading.main_thread():
                Slow.interrupts = False
                os.kill(os.getpid(), signal.SIGINT)
            return x

    model = nn.Sequential(*run.model(), Slow())
    with gapless.Pipeline(model, devices=4, schedule="zb-h2", microbatches=4, loss=F.mse_loss) as pipe:
        optimizer, scheduler = run.optimizer_of(pipe.parameters())
        training = pipe.training(optimizer, max_norm=1.0, scheduler=scheduler)
        for step in range(4):
            training.step(*run.batch(step))
        Slow.interrupts = True
        with pytest.raises(KeyboardInterrupt):
            train(training, [run.batch(step) for step in range(4, 100)])
        settled = pipe.steps
        assert all(map(torch.equal, pipe.state_dict().values(), state_after(run, settled).values()))
        for step in range(settled, settled + 3):
            training.step(*run.batch(step))
        assert all(map(torch.equal, pipe.state_dict().values(), state_after(run, settled + 3).values()))


def loses_a_rank(folder: str) -> None:
    run = Run(5, schedule="1f1b", devices=3)
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("pp",))
    model = run.model()
    pipe = gapless.Pipeline(model, mesh=mesh, microbatches=4, loss=F.mse_loss)
    optimizer, scheduler = run.optimizer_of(pipe.parameters())
    training = pipe.training(optimizer, max_norm=1.0, scheduler=scheduler)
    for step in range(5):
        training.step(*run.batch(step))
    if dist.get_rank() == 1:
        os._exit(0)
    with pytest.raises(TransportError, match="rank 1") as raised:
        train(training, [run.batch(step) for step in range(5, 8)])
    settled = pipe.steps
    assert settled in (4, 5), settled
    assert any(f"as before step {settled}" in note for note in raised.value.__notes__)
    state = state_after(run, settled)
    for name, value in model.named_parameters():
        assert not pipe._world.holds(value) or torch.equal(value, state[name])
    print("as it was", flush=True)
    os._exit(0)


def test_a_rank_that_dies_leaves_the_others_at_the_last_settled_step(launch: Launch) -> None:
    assert launch(loses_a_rank, 3, "").count("as it was") == 2
