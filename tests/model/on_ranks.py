"""What ranks run of the tests of Hugging Face's models: imported, with all it needs, before they are forked."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import transformers.models.llama.modeling_llama  # noqa: F401  # once for all ranks
from torch.distributed.device_mesh import init_device_mesh

import gapless
from tests.model.strangers import STRANGERS
from tests.model.test_strangers import MICROBATCHES, trained


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
