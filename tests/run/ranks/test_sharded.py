"""Stages whose layers are tensor parallel or sharded by FSDP: they train as the plain model does, to rounding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gapless
from tests.run.forked import Launch

SEED = 11


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def composed(*schedules: str) -> None:
    for number, schedule in enumerate(schedules):
        (_tensor_parallel, _fully_sharded)[number % 2](schedule)


def _blocks() -> nn.Sequential:
    torch.manual_seed(8)
    return nn.Sequential(*(Block() for _ in range(4)))


def _tensor_parallel(schedule: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("pp", "tp"))
    plain, model = _blocks(), _blocks()
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    _close_to(mesh, model, plain, schedule, lambda whole: whole)


def _fully_sharded(schedule: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("pp", "dp"))
    plain, model = _blocks(), _blocks()
    for block in model:
        fully_shard(block, mesh=mesh["dp"])
    replica = mesh.get_local_rank("dp")
    _close_to(mesh, model, plain, schedule, lambda whole: whole.tensor_split([5])[replica])


def _close_to(mesh: DeviceMesh, model: Any, plain: Any, schedule: str, share: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(9)
    with gapless.Pipeline(model, mesh=mesh, schedule=schedule, microbatches=4, loss=F.mse_loss, seed=SEED) as pipe:
        ours = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
        for step in range(3 if schedule == "1f1b" else 2):
            x, y = torch.randn(12, 8), torch.randn(12, 8)
            result = pipe.step(share(x), share(y))
            expected_loss = F.mse_loss(plain(x), y)
            expected_loss.backward()
            torch.testing.assert_close(result.loss, expected_loss.detach(), atol=1e-6, rtol=1e-6)
            names = dict(plain.named_parameters())
            for name, parameter in pipe.named_parameters():
                assert parameter.grad is not None
                grad = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
                where = f"{schedule}, step {step}, {name}"
                assert torch.allclose(grad, names[name].grad, atol=1e-6, rtol=1e-5), where
            norm = pipe.clip_grad_norm_(0.1)
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1), atol=1e-6, rtol=1e-6)
            if step != 1:
                ours.step(), theirs.step()
                ours.zero_grad(), theirs.zero_grad()
        outputs = pipe.evaluate(share(x)).outputs
        if outputs is not None:
            torch.testing.assert_close(outputs, share(plain(x)).detach(), atol=1e-6, rtol=1e-5)
        state = pipe.state_dict()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-6, rtol=1e-5)
        pipe.load_state_dict(state)
        torch.testing.assert_close(pipe.state_dict(), state, atol=0, rtol=0)


@pytest.mark.parametrize(
    "schedules",
    [("zb-h1", "zb-v"), pytest.param(("1f1b", "1f1b", "zb-v", "zb-h1"), marks=pytest.mark.slow)],
    ids="-".join,
)
def test_tensor_parallel_and_sharded_stages_train_as_the_plain_model(
    schedules: tuple[str, ...], launch: Launch
) -> None:
    launch(composed, 4, *schedules)
