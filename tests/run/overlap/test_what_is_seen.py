"""What users see and set around an optimizer step that does not wait: it is as if it did."""

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gapless
from gapless.errors import ConfigError
from gapless.schedule.lower import consecutive
from tests.by_hand import seeded_loop
from tests.measured_picture import three_steps
from tests.pipelines import Do, Own
from tests.run.forked import Launch
from tests.run.overlap.plain_training import WIDTH, Run


class Counter(nn.Module):
    """Holds a number that is no buffer, and uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 0.01 * self.calls)


class Noise(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn(x.shape, generator=self.generator)


class Slow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.001)
        return super().forward(x)


class Doubled(nn.Module):
    """Its part has another weight while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Slow(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return torch.func.functional_call(self.part, {"weight": self.part.weight * 2}, (x,))


def waits(run: Run, model: nn.Sequential, steps: int) -> nn.Sequential:
    """A loop over microbatches."""
    optimizer, _ = run.optimizer_of(model.parameters())
    for step in range(steps):
        seeded_loop(model, *run.batch(step), microbatches=run.microbatches, step=step)
        if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize(
    ("layer", "schedule"),
    [(Counter, "gpipe"), (Noise, "zb-h2"), (lambda: nn.Dropout(0.3), "zb-h2"), (Doubled, "zb-h2")],
)
def test_forwards_that_run_again_leave_no_trace(layer: Any, schedule: str) -> None:
    """A large step in the middle is clipped when forwards of the next one have run."""
    run = Run(2, schedule=schedule, large=(4, 7, 8, 11), bad=(6,), scheduled=False)

    def model() -> nn.Sequential:
        return nn.Sequential(*(part for each in run.model() for part in (each, layer())))

    trained = model()
    with gapless.Pipeline(trained, devices=4, schedule=schedule, microbatches=4, loss=F.mse_loss) as pipe:
        training = pipe.training(run.optimizer_of(pipe.parameters())[0], max_norm=1.0)
        for step in range(14):
            training.step(*run.batch(step))
        training.settle()
    wanted = waits(run, model(), 14)
    assert all(map(torch.equal, trained.parameters(), wanted.parameters()))
    assert [each.calls for each in trained if isinstance(each, Counter)] == [
        each.calls for each in wanted.modules() if isinstance(each, Counter)
    ]


def test_a_learning_rate_that_is_set_between_steps_holds_for_the_next_one() -> None:
    run = Run(6, scheduled=False, optimizer="sgd")
    models = run.model(), run.model()
    with gapless.Pipeline(models[0], devices=4, schedule="zb-h2", microbatches=4, loss=F.mse_loss) as pipe:
        optimizer, _ = run.optimizer_of(pipe.parameters())
        training = pipe.training(optimizer)
        for step in range(10):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            training.step(*run.batch(step))
        training.settle()
    with gapless.Pipeline(models[1], devices=4, schedule="zb-h2", microbatches=4, loss=F.mse_loss) as pipe:
        optimizer, _ = run.optimizer_of(pipe.parameters())
        for step in range(10):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            pipe.step(*run.batch(step))
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, *(model.parameters() for model in models)))


def test_whoever_reads_the_optimizer_or_the_model_reads_a_settled_step(tmp_path: Any) -> None:
    run = Run(7, schedule="zb-h2")
    with gapless.Pipeline(run.model(), devices=4, schedule="zb-h2", microbatches=4, loss=F.mse_loss) as pipe:
        optimizer, scheduler = run.optimizer_of(pipe.parameters())
        training = pipe.training(optimizer, max_norm=1.0, scheduler=scheduler)
        for step in range(1, 7):
            result = training.step(*run.batch(step))
            if step > 4:
                assert repr(result) == "Result(under way)" or repr(result).startswith("Result(loss=")
            state = optimizer.state_dict()
            assert {int(each["step"]) for each in state["state"].values()} == {step}
        training.step(*run.batch(7))
        pipe.save(tmp_path / "saved", optimizer, scheduler)
        assert scheduler.last_epoch == 7
        assert pipe.steps == 7
        training.step(*run.batch(8))
        assert pipe.evaluate(torch.zeros(4, WIDTH)).outputs.shape == (4, WIDTH)
        assert scheduler.last_epoch == 8


def test_an_update_of_several_minibatches_is_shared_out_while_the_one_before_is_under_way() -> None:
    run = Run(7, schedule="zb-h2")
    batches = [run.batch(step) for step in (3, 4)]
    with gapless.Pipeline(run.model(), devices=4, schedule="zb-h2", microbatches=4, loss=F.mse_loss) as pipe:
        training = pipe.training(run.optimizer_of(pipe.parameters())[0])
        wanted = pipe.shares(batches)
        first, second = (training.step(*run.batch(step)) for step in (1, 2))
        assert pipe.shares(batches) == wanted
        assert first.is_settled
        assert not second.is_settled
        assert pipe.evaluate(batches[0][0]).outputs is not None
        assert second.is_settled


def test_a_loss_can_be_read_before_the_step_is_settled() -> None:
    """The backward of the step waits until its loss was read."""
    read = threading.Event()

    class Held(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            assert read.wait(60)
            return grads[0]

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Do(Held.apply), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    with gapless.Pipeline(model, devices=2, schedule="gpipe", microbatches=2, loss=F.mse_loss) as pipe:
        training = pipe.training(torch.optim.SGD(pipe.parameters(), lr=0.1), max_norm=1.0)
        read.set()
        for step in range(3):
            training.step(*Run(1, microbatches=2).batch(step))
        training.settle()
        read.clear()
        result = training.step(*Run(1, microbatches=2).batch(3))
        assert result.loss is not None
        read.set()
        assert result.norm is not None
        assert not result.skipped


def replicas_train() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    run, states = Run(8, schedule="zb-h2", large=(3, 6), bad=(5,)), []
    for overlaps in (True, False):
        with gapless.Pipeline(run.model(), mesh=mesh, schedule="zb-h2", microbatches=4, loss=F.mse_loss) as pipe:
            optimizer, _ = run.optimizer_of(pipe.parameters())
            scaler = torch.amp.GradScaler("cpu", 2.0**10)  # a power of two leaves the bits as they are
            training = pipe.training(optimizer, max_norm=1.0, scaler=scaler) if overlaps else None
            for step in range(8):
                batch = run.batch(2 * step + mesh.get_local_rank("dp"))
                if training is not None:
                    training.step(*batch)
                    continue
                pipe.step(*batch)
                if pipe.clip_grad_norm_(1.0).isfinite():
                    optimizer.step()
                pipe.zero_grad()
            states.append(pipe.state_dict())
    assert all(map(torch.equal, states[0].values(), states[1].values()))
    dist.barrier()


def test_replicas_sum_their_gradients_before_each_steps_its_part(launch: Launch) -> None:
    launch(replicas_train, 4)


def test_timelines_of_consecutive_steps_are_joined_to_the_schedule_of_all_of_them() -> None:
    found = three_steps(0.0)
    alone = [[a for a in row if a.microbatch < 5 and a.kind.value not in "UV"] for row in found.schedule.rows]
    assert found.schedule == consecutive(gapless.Schedule.of(alone, name="zb-h2"), 3)
    assert gapless.verify(found.schedule).ok
    for starts, ends in zip(found.starts, found.ends, strict=True):
        assert all(start <= end for start, end in zip(starts, ends, strict=True))
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert sum(action.kind.value == "V" for action, _, _ in found.all_spans) == 6


def late(layer: Any, x: Tensor) -> Tensor:
    """Counts samples that are far off, of which there are none at first."""
    layer.far.extend([True] * int((x.detach().abs() > 50).sum()))
    return x * (1 + 0.01 * len(layer.far))


def test_a_layer_that_changes_what_it_holds_late_is_refused_if_its_forwards_run_again() -> None:
    """Nobody looked at what it holds when they ran first."""
    run = Run(2, schedule="gpipe", large=(5,), scheduled=False)
    with gapless.Pipeline(
        nn.Sequential(Own(late, far=[]), *run.model()), devices=4, schedule="gpipe", microbatches=4, loss=F.mse_loss
    ) as pipe:
        training = pipe.training(run.optimizer_of(pipe.parameters())[0], max_norm=3.0)
        for step in range(6):
            training.step(*run.batch(step))
        x, y = run.batch(6)
        with pytest.raises(ConfigError, match="a layer changed something for the first time"):
            assert training.step(100 * x, y).norm is None
