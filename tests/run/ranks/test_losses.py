"""A loss with weights of its own: they learn on the last stage, and every rank has them as they are there."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gapless
from gapless.errors import ConfigError
from tests.pipelines import assert_same
from tests.run.forked import Launch


class Scaled(nn.Module):
    """With a weight that learns, and an average that moves."""

    average: Tensor

    def __init__(self, start: float = 0.3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), start))
        self.register_buffer("average", torch.zeros(6))

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.lerp_(outputs.mean(0), 0.1)
        return F.mse_loss(outputs * self.scale.exp(), target)


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(6, 6), nn.Linear(6, 6)]


def batch(number: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(number)
    return torch.randn(8, 6, generator=chance), torch.randn(8, 6, generator=chance)


def learns(schedule: str) -> None:
    """As in a plain loop, over a checkpoint in the middle. With zb-v the last stage is on rank 0."""
    plain, goal = nn.Sequential(*layers(), *(nn.Linear(6, 6) for _ in range(2 * (schedule == "zb-v")))), Scaled()
    ours, loss = nn.Sequential(*layers(), *(nn.Linear(6, 6) for _ in range(2 * (schedule == "zb-v")))), Scaled()
    ours.load_state_dict(plain.state_dict())
    dist.broadcast_object_list(whole := [plain.state_dict()], 0)
    for model in (plain, ours):
        model.load_state_dict(whole[0])
    theirs = torch.optim.Adam([*plain.parameters(), *goal.parameters()], lr=0.1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    options: dict[str, Any] = {"mesh": mesh, "microbatches": 4, "loss": loss, "timeout": 60.0, "schedule": schedule}
    with gapless.Pipeline(ours, **options) as pipe:
        optimizer = torch.optim.Adam([*pipe.parameters(), *loss.parameters()], lr=0.1)
        for number in range(6):
            x, y = batch(number)
            pipe.step(x, y)
            for part, target in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
                (goal(plain(part), target) * (len(part) / len(x))).backward()
            norm = nn.utils.clip_grad_norm_([*plain.parameters(), *goal.parameters()], 0.5)
            assert_same(pipe.clip_grad_norm_(0.5), norm, f"norm {number}")
            for each in (optimizer, theirs):
                each.step()
            theirs.zero_grad()
            pipe.zero_grad()
            assert_same(loss.state_dict(), goal.state_dict(), f"step {number}, rank {dist.get_rank()}")
            if number == 2:
                folder = [tempfile.mkdtemp()]
                dist.broadcast_object_list(folder, 0)
                pipe.save(Path(folder[0], "saved"), optimizer)
                with torch.no_grad():
                    loss.scale.zero_()
                optimizer.state.clear()
                pipe.load(Path(folder[0], "saved"), optimizer)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_every_rank_has_the_loss_as_it_was_trained(schedule: str, launch: Launch) -> None:
    """Ranks other than the last stage's kept the untrained one, and clipping left it out."""
    launch(learns, 2, schedule)


def starts_apart() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    loss = Scaled(0.1 * dist.get_rank())
    with gapless.Pipeline(layers(), mesh=mesh, microbatches=4, loss=loss, timeout=60.0) as pipe:  # noqa: SIM117
        with pytest.raises(ConfigError, match="do not start with the same weights: scale of the loss differ"):
            pipe.step(*batch(0))


def test_losses_that_start_with_different_weights_are_noticed(launch: Launch) -> None:
    launch(starts_apart, 2)


def test_a_loss_is_clipped_with_the_model_in_one_process() -> None:
    model, loss = layers(), Scaled()
    with gapless.Pipeline(model, devices=2, microbatches=2, loss=loss) as pipe:
        pipe.step(*batch(0))
        everything = [each for part in (*model, loss) for each in part.parameters()]
        norms = torch.stack([each.grad.norm() for each in everything if each.grad is not None])
        torch.testing.assert_close(pipe.clip_grad_norm_(0.1), norms.norm())
        pipe.zero_grad()
        assert loss.scale.grad is None
