"""What an optimizer step that does not wait can't do is refused by name, before a number is wrong."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gapless
from gapless.errors import ConfigError
from tests.run.forked import Launch
from tests.run.overlap.plain_training import WIDTH, Run, Signs


class Counting(torch.optim.SGD):
    """Counts its steps where nobody can undo that."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.made = 0


class Normed(torch.optim.Optimizer):
    """Divides by the norm of all gradients that it has."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        own = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = nn.utils.get_total_norm([each.grad for each in own if each.grad is not None])
        for each in own:
            each.sub_(each.grad / norm, alpha=0.1)


class Grouped(Normed):
    """Keeps what it computes from all gradients in a group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["largest"] = max(float(each.grad.abs().max()) for each in group["params"] if each.grad is not None)


class Slow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return x


def pipeline(**more: Any) -> gapless.Pipeline:
    return gapless.Pipeline(Run(1).model(), devices=2, microbatches=2, loss=F.mse_loss, **more)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, WIDTH), torch.randn(4, WIDTH)


def hooked(parameters: Any) -> torch.optim.Optimizer:
    made = torch.optim.SGD(parameters, lr=0.1)
    made.register_step_post_hook(lambda *_: None)
    return made


def replaced(parameters: Any) -> torch.optim.Optimizer:
    made = torch.optim.SGD(parameters, lr=0.1)
    made.step = lambda closure=None: None  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Counting, "Counting keeps made outside of its state and param_groups, where a step can't be undone"),
        (torch.optim.LBFGS, "LBFGS steps with a closure, which computes a loss again"),
        (hooked, "SGD has step hooks, which would see parts of a step: remove them"),
        (replaced, "the step of this SGD was replaced"),
        (
            lambda _: torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0),
            "1 of 1 parameters of the optimizer are not",
        ),
        (lambda _: "sgd", "optimizer is a str"),
        (Normed, "Normed steps a parameter differently if it does not have all of them"),
        (Grouped, "Grouped computes 'largest' of a parameter group from all parameters together"),
    ],
)
def test_an_optimizer_whose_step_can_not_be_made_in_parts_or_undone_is_refused(
    make: Callable[..., Any], words: str
) -> None:
    with pipeline() as pipe:
        before = {name: value.clone() for name, value in pipe.state_dict().items()}
        with pytest.raises(ConfigError, match=words):
            pipe.training(make(pipe.parameters())).step(*batch())
        assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())
        pipe.step(*batch())  # the pipeline goes on


def test_arguments_that_make_no_sense_are_refused() -> None:
    with pipeline() as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        other = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(pipe.parameters(), lr=0.1), 1)
        for more, words in (
            ({"max_norm": 0.0}, "max_norm is 0.0, but it must be above 0"),
            ({"scheduler": plateau}, "ReduceLROnPlateau steps with a metric"),
            ({"scheduler": other}, "the StepLR is for another optimizer"),
            ({"max_nrom": 1.0}, "training has no option max_nrom=: did you mean max_norm="),
            ({"scaler": object()}, "scaler is a object, but training takes a torch.amp.GradScaler"),
        ):
            with pytest.raises(ConfigError, match=words):
                pipe.training(optimizer, **more)
        with pytest.raises(ConfigError, match=r"a step of training takes no scaler=: give it to pipe\.training"):
            pipe.training(optimizer).step(*batch(), scaler=object())
        scaler = torch.amp.GradScaler("cpu")
        training = pipe.training(optimizer, scaler=scaler)
        for _ in range(2):
            training.step(*batch())
        scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0})
        with pytest.raises(ConfigError, match="the scaler was changed while a step is under way"):
            training.step(*batch())
        pipe.module().half()
        with pytest.raises(ConfigError, match="parameters are float16, whose gradients a GradScaler does not unscale"):
            pipe.training(torch.optim.SGD(pipe.parameters(), lr=0.1), scaler=scaler).step(*batch())


def test_timelines_on_other_clocks_are_not_joined() -> None:
    with pipeline(timeline=True) as pipe:
        training = pipe.training(torch.optim.SGD(pipe.parameters(), lr=0.1))
        read = [training.step(*batch()).timeline for _ in range(2)]  # which settles each step
        found = [each for each in read if each is not None]
        assert len(found) == 2
        (first, second), later = found, [training.step(*batch()) for _ in range(4)]
        ahead = [each.timeline for each in later if each.timeline is not None]
        gapless.join_steps(ahead[:3])  # that did not wait for each other
        for pair in ([first, second], [second, first], [second, ahead[0]], ahead[1::-1]):
            with pytest.raises(
                ConfigError, match="these timelines are not of consecutive steps on one clock: join those"
            ):
                gapless.join_steps(pair)
    with pytest.raises(ConfigError, match="there is no timeline to join"):
        gapless.join_steps([])


def weights_after(between: Callable[[gapless.Pipeline, nn.Module], object]) -> list[torch.Tensor]:
    """Of a few steps of SGD, with something done between them."""
    torch.manual_seed(5)
    model, batches = Run(1).model(), [batch() for _ in range(6)]
    with gapless.Pipeline(model, devices=2, schedule="zb-v", microbatches=4, loss=F.mse_loss) as pipe:
        training = pipe.training(torch.optim.SGD(pipe.parameters(), lr=0.1))
        for x, y in batches:
            training.step(x, y)
            between(pipe, model)
        training.close()
        return [each.detach().clone() for each in model.parameters()]


def test_clearing_gradients_between_steps_changes_nothing() -> None:
    """`model.zero_grad()`, as in every loop: gradients of a step that was under way were lost."""
    plain = weights_after(lambda pipe, model: None)
    for clear in (lambda pipe, model: model.zero_grad(), lambda pipe, model: pipe.zero_grad()):
        assert all(torch.equal(a, b) for a, b in zip(weights_after(clear), plain, strict=True))


def used_between(settles: bool) -> list[torch.Tensor]:
    """What a model is, and what was read of it, if each of these uses comes between two steps."""
    torch.manual_seed(5)
    parts = (nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), Slow(), nn.Linear(WIDTH, WIDTH))
    model = nn.Sequential(*parts)
    averaged, found = torch.optim.swa_utils.AveragedModel(model), list[torch.Tensor]()
    uses: tuple[Callable[[], object], ...] = (
        model.eval,
        model.train,
        parts[1].eval,
        lambda: averaged.update_parameters(model),
        lambda: found.extend(each.clone() for each in model.state_dict().values()),
        lambda: model.load_state_dict(averaged.module.state_dict()),
        model.zero_grad,
    )
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss) as pipe:
        training = pipe.training(torch.optim.SGD(pipe.parameters(), lr=0.1))
        training.step(*batch())
        for use in uses:
            result = training.step(*batch())
            assert not result.is_settled
            if settles:
                training.settle()
            use()
            assert result.is_settled
            found += result.losses
        training.close()
    return [*found, *averaged.state_dict().values(), *model.state_dict().values()]


def test_a_model_that_is_evaluated_read_or_loaded_between_steps_has_settled() -> None:
    """`model.eval()` before `pipe.evaluate` switched off the dropout of a step that was under way."""
    assert all(map(torch.equal, used_between(settles=True), used_between(settles=False)))


def test_habits_of_other_loops_are_refused() -> None:
    def steps(pipe: gapless.Pipeline, scheduled: bool = False) -> tuple[Any, Any, Any]:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1) if scheduled else None
        training = pipe.training(optimizer, scheduler=scheduler)
        for _ in range(3):
            training.step(*batch())
        return training, optimizer, scheduler

    with pipeline() as pipe:
        training, optimizer, _ = steps(pipe)
        with pytest.raises(ConfigError, match=r"leave out optimizer.step\(\) and zero_grad\(\)"):
            optimizer.zero_grad()
        with pytest.raises(ConfigError, match="clips the gradients itself: give it max_norm="):
            pipe.clip_grad_norm_(1.0)
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        with pytest.raises(ConfigError, match="the optimizer has other parameters than before: close the training"):
            training.step(*batch())
        training.close()
        optimizer.zero_grad()  # which is its owner's again
        assert float(pipe.clip_grad_norm_(1.0)) == 0.0
    with pipeline() as pipe:
        training, optimizer, _ = steps(pipe)
        next(iter(optimizer.param_groups[0]["params"])).requires_grad_(False)
        with pytest.raises(ConfigError, match=r"frozen or unfrozen while a step was under way: call training.settle"):
            training.step(*batch())
    optimizer.zero_grad()  # and so it is after the pipeline
    optimizer.step()
    with pipeline() as pipe:
        training, _, scheduler = steps(pipe, scheduled=True)
        scheduler.step()
        with pytest.raises(ConfigError, match=r"leave out scheduler.step\(\)"):
            training.step(*batch())


def what_ranks_can_not_take() -> None:
    """DTensors, messages without a word, and an optimizer that needs all parameters."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "pp"))
    model = Run(1).model()
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh["dp"])
    with gapless.Pipeline(model, mesh=mesh, microbatches=2, loss=F.mse_loss) as pipe:
        training = pipe.training(torch.optim.SGD(pipe.parameters(), lr=0.1))
        with pytest.raises(ConfigError, match=r"parameters are sharded \(FSDP or tp\)"):
            training.step(*batch())
    line = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    with (
        gapless.Pipeline(Run(1).model(), mesh=line, microbatches=2, loss=F.mse_loss, static_shapes=True) as pipe,
        pytest.raises(ConfigError, match="with static_shapes, ranks can't announce forwards that run again"),
    ):
        pipe.training(torch.optim.SGD(pipe.parameters(), lr=0.1))
    with gapless.Pipeline(Run(1).model(), mesh=line, microbatches=2, loss=F.mse_loss) as pipe:
        training = pipe.training(Normed(pipe.parameters()))
        with pytest.raises(ConfigError, match=r"Normed steps a parameter differently .* use devices= in one process"):
            training.step(*batch())
    print("refused", flush=True)
    os._exit(0)


def test_what_ranks_can_not_take_is_refused(launch: Launch) -> None:
    assert launch(what_ranks_can_not_take, 2).count("refused") == 2


def test_streams_have_no_steps_to_overlap() -> None:
    with (
        gapless.Pipeline(Run(1).model(), devices=2, schedule="pipedream", loss=F.mse_loss) as pipe,
        pytest.raises(ConfigError, match=r"train with pipe.stream\(\)"),
    ):
        pipe.training(torch.optim.SGD(pipe.parameters(), lr=0.1))


def test_a_loop_that_steps_the_optimizer_too_is_told_so() -> None:
    with pipeline() as pipe:
        optimizer = Signs(pipe.parameters(), lr=0.1)
        training = pipe.training(optimizer)
        training.step(*batch())
        with pytest.raises(ConfigError, match=r"leave out optimizer.step\(\) and zero_grad\(\)"):
            optimizer.step()
        training.close()
        pipe.step(*batch())
        optimizer.step()


def test_a_clip_of_gradients_that_are_gone_says_so() -> None:
    """It returned a norm of 0."""
    with pipeline() as pipe, pipe.training(torch.optim.SGD(pipe.parameters(), lr=0.1)) as training:
        training.step(*batch())
        training.settle()
        with pytest.warns(UserWarning, match="finds no gradient: pipe.training clips the gradients itself"):
            torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)


def test_a_scheduler_that_is_read_while_a_step_is_under_way_is_not_a_step_behind() -> None:
    with pipeline() as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        kind = type(scheduler)
        with pipe.training(optimizer, scheduler=scheduler) as training:
            for step in range(1, 5):
                training.step(*batch())
                if step % 2:
                    assert scheduler.get_last_lr() == [1 / (1 + step)]
                else:
                    assert scheduler.state_dict()["last_epoch"] == step
        assert type(scheduler) is kind
