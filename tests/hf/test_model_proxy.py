"""What CUDA graphs see of a trainer."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch

from gapless.stage.graphs.code_run import CodeRun
from gapless.stage.graphs.graph_assumptions import Unchanged
from tests.hf.training import arguments, both, trained
from tests.model.hub import VOCAB, gpt2, hub, llama


@pytest.mark.usefixtures("traced_once")
def test_a_trainer_s_loss_changes_with_what_it_reads_alone(tmp_path: Path) -> None:
    """A trainer itself changes in every step; and its code asks nothing of the outside."""
    from gapless.hf import PipelineTrainer

    seen, codes = [], list[CodeRun]()

    class Watched(PipelineTrainer):
        def training_step(self, *args: Any, **more: Any) -> Any:
            loss = super().training_step(*args, **more)
            seen.append(Unchanged([self._unchanging]))
            return loss

        def _compute_loss(self, *args: Any) -> Any:
            codes.append(CodeRun())
            with codes[-1]:
                return super()._compute_loss(*args)

    args = arguments(tmp_path, label_smoothing_factor=0.1, bf16=True)
    trainer, _ = trained(Watched, gpt2(), args, devices=2)
    assert len(seen) == 12
    assert all(each == seen[0] for each in seen)
    assert codes[-1].read
    assert codes[-1].source is None  # the first may import something

    def looked() -> Unchanged:
        trainer._unchanging.look()
        return Unchanged([trainer._unchanging])

    assert looked() == seen[0]
    trainer.label_smoother.epsilon = 0.2
    assert looked() != seen[0]
    trainer.label_smoother.epsilon = 0.1
    trainer.compute_loss_func = lambda outputs, labels, **_: outputs.logits.mean()
    assert looked() != seen[0]
    trainer.compute_loss_func = None
    trainer.args.average_tokens_across_devices = not trainer.args.average_tokens_across_devices
    assert looked() != seen[0]
    trainer.compute_loss = types.MethodType(lambda self, *_, **__: self.state.global_step, trainer)
    before = looked()
    trainer.state.global_step += 1
    assert looked() != before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("asked", [{"bf16": True}, {"bf16": True, "label_smoothing_factor": 0.1}, {"fp16": True}, {}])
def test_a_trainer_gets_graphs_and_the_bits_of_trainer(asked: dict[str, Any], tmp_path: Path) -> None:
    found = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCAB, (96, 8), generator=found)
    dataset = [{"input_ids": each, "labels": each} for each in tokens]
    args = arguments(tmp_path, use_cpu=False, max_steps=10, **asked)
    more: dict[str, Any] = {"train_dataset": dataset, "data_collator": hub().default_data_collator}
    _, trainer = both(llama(), args, devices=["cuda:0"] * 2, pipeline={"graphs": True}, **more)
    assert repr(trainer.pipe).count(", graphs") == 2, repr(trainer.pipe)
