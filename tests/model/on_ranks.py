"""What ranks run of the tests of Hugging Face's models: imported, with all it needs, before they are forked."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import transformers.models.llama.modeling_llama  # noqa: F401  # once for all ranks
from torch.distributed.device_mesh import init_device_mesh

import gapless
from tests.model.strangers import STRANGERS
from tests.model.test_counting import Own, batch, llama, own_loop, shifted
from tests.model.test_strangers import MICROBATCHES, trained


def replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica = mesh.get_local_rank("dp")
    torch.manual_seed(4)
    model = llama()
    local = [copy.deepcopy(model) for _ in range(2)]
    data = [batch(), batch()]
    data[1]["labels"][:, 3:] = -100
    total = sum(map(shifted, data))
    with gapless.Pipeline(model, mesh=mesh, microbatches=4) as pipe:
        pipe.step(data[replica])
        for number, each in enumerate(local):
            own_loop(each, data[number], shifted, total=total)
        first, second = (dict(each.named_parameters()) for each in local)
        for name, parameter in pipe.named_parameters():
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, first[name].grad + second[name].grad), name  # type: ignore[operator]
    # what is not known must be even over the replicas, too
    with (
        gapless.Pipeline(Own(), mesh=mesh, microbatches=1, timeout=40) as pipe,
        pytest.raises(gapless.GaplessError, match="spread unevenly"),
    ):
        pipe.step((data[replica]["input_ids"], data[replica]["labels"]))
    dist.barrier()


def strangers_between_ranks(*names: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    for name in names:
        torch.manual_seed(5)
        model = STRANGERS[name][0]()
        reference = copy.deepcopy(model)
        with gapless.Pipeline(
            model,
            mesh=mesh,
            microbatches=MICROBATCHES,
            tied="exact",
            intra_op_threads=torch.get_num_threads(),
        ) as pipe:
            trained(name, pipe, reference, steps=1)
