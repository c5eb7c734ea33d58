"""What ranks run of the tests of models without weights: imported, with all it needs, before they are forked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers.models.gpt2.modeling_gpt2  # noqa: F401  # once for all ranks
from torch.distributed.device_mesh import init_device_mesh

import gapless.hf
from tests.hf.models import batch_of, lora_config, trained_in_stages
from tests.hf.on_ranks import as_under_torchrun
from tests.hf.training import arguments, padded, rows


def read_train_and_save(folder: str, *kinds: str) -> None:
    """Each rank has its own part, and no more, from the start to the end."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    threads = torch.get_num_threads()
    for kind in kinds:
        options: dict[str, Any] = {"mesh": mesh, "microbatches": 4, "tied": "exact", "intra_op_threads": threads}
        with gapless.hf.load(f"{folder}/{kind}", example=batch_of(kind), **options) as pipe:
            own = {id(each) for each in pipe.parameters()}
            for name, each in pipe.module().named_parameters():
                assert each.is_meta is (id(each) not in own), name
            trained_in_stages(pipe, kind, steps=2)
            pipe.save_pretrained(f"{folder}/{kind}-trained", max_shard_size=20_000)


def train_parts(folder: str, steps: str) -> None:
    """PipelineTrainer with a model that no rank has whole; it goes on from where it was, if it was."""
    as_under_torchrun()
    trainer = gapless.hf.PipelineTrainer(
        gapless.hf.empty_model(f"{folder}/gpt2"),
        arguments(Path(folder, "ours"), max_steps=int(steps), save_strategy="steps", save_steps=2, num_train_epochs=9),
        train_dataset=rows(28),
        data_collator=padded,
        pipeline={"intra_op_threads": 1},
    )
    trainer.train(resume_from_checkpoint=Path(folder, "ours", "checkpoint-2").exists())
    assert any(each.is_meta for each in trainer.model.parameters())
    trainer.save_model(f"{folder}/trained {steps}")


def train_adapters(folder: str, steps: str) -> None:
    """The same with adapters, which every rank has, on weights that it has its part of."""
    as_under_torchrun()
    model = gapless.hf.empty_model(f"{folder}/llama", peft_config=lora_config(), seed=5)
    asked = arguments(Path(folder, "ours"), max_steps=int(steps), save_strategy="steps", save_steps=2)
    more: Any = {"train_dataset": rows(28), "data_collator": padded, "pipeline": {"intra_op_threads": 1}}
    trainer = gapless.hf.PipelineTrainer(model, asked, **more)
    trainer.train(resume_from_checkpoint=Path(folder, "ours", "checkpoint-2").exists())
    assert any(each.is_meta for each in trainer.model.parameters())
    trainer.save_model(f"{folder}/adapter {steps}")
