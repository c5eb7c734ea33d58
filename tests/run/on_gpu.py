"""What ranks with a GPU do in tests. Not in the file of the tests: to ask for a GPU, as those do, spoils a fork."""

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh

import gapless
from gapless.zoo.gpt import gpt, next_token_loss
from tests.pipelines import SEED, assert_same, mlp

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 6)


def steps_on_the_gpu(schedule: str, remat: Any = "none") -> None:
    """Three steps of an MLP and of a GPT with dropout, equal to the plain loop on the same GPU."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("pp",))
    tokens = torch.randint(0, 11, (8, 5), generator=torch.Generator().manual_seed(2))
    for model, inputs, target, loss in (
        (mlp(16), X, Y, F.mse_loss),
        (gpt(vocab=11, width=8, depth=16, heads=2, context=5, dropout=0.1), tokens, tokens, next_token_loss),
    ):
        reference = copy.deepcopy(model).cuda()
        inputs, target = inputs.cuda(), target.cuda()
        with gapless.Pipeline(
            model, mesh=mesh, schedule=schedule, microbatches=4, loss=loss, seed=SEED, remat=remat
        ) as pipe:
            for number in range(3):
                ours = pipe.step(inputs, target)
                plain = gapless.plain_step(reference, inputs, target, loss=loss, microbatches=4, seed=SEED, step=number)
                assert_same(ours.loss, plain.loss, f"{schedule}, step {number}, loss")
                grads = dict(reference.named_parameters())
                for name, parameter in pipe.named_parameters():
                    assert parameter.is_cuda
                    assert_same(parameter.grad, grads[name].grad, f"{schedule}, step {number}, {name}")
            assert pipe.evaluate(inputs, target).loss is not None


def with_nccl() -> None:
    """The group of the launcher is Gloo: this one is for the GPU."""
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    steps_on_the_gpu("1f1b")


def planned_on_the_gpu() -> None:
    """Links through pinned buffers, and the plan that all ranks have."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("pp",))
    (link,) = gapless.measure_links(mesh)
    assert 1e-6 < link.latency < 0.1
    assert link.bandwidth is not None
    assert 1e7 < link.bandwidth < 1e12
    model = mlp(16)
    plan = gapless.make_plan(
        model, X.cuda(), Y.cuda(), mesh=mesh, loss=F.mse_loss, schedules=["1f1b", "zb-h1"], seconds=0.1
    )
    with gapless.Pipeline(model, mesh=mesh, schedule=plan, loss=F.mse_loss) as pipe:
        assert pipe.step(X.cuda(), Y.cuda()).loss is not None
