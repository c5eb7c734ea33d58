"""Hugging Face models from small configs, their code untouched: through stages as through their own plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.model.reference import Reference
from tests.model.hub import VOCAB, bert, gpt2, hub, llama, t5
from tests.model.training import assert_exact, assert_same, assert_same_state

pytestmark = pytest.mark.usefixtures("traced_once")


def batch(samples: int = 6, length: int = 7) -> dict[str, Tensor]:
    mask = torch.ones(samples, length, dtype=torch.long)
    mask[:, -2:] = 0
    ids, labels = (torch.randint(3, VOCAB, (samples, length)) for _ in range(2))
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("make", [gpt2, *(pytest.param(make, marks=pytest.mark.slow) for make in (llama, bert, t5))])
def test_a_model_with_labels_has_the_bits_of_its_own_loop(make: Callable[[], nn.Module]) -> None:
    """Others are quick in test_own_loss.py."""
    torch.manual_seed(4)
    model = make()
    batches: list[tuple[Any, Any]] = [(batch(), None), (batch(7), None)]
    assert_exact(model, batches, devices=4, schedule="1f1b", remat="stage")


def test_a_loss_of_ones_own_takes_the_logits() -> None:

    def loss(outputs: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(outputs.logits.flatten(0, 1), target.flatten(), label_smoothing=0.1)

    both = batch()
    labels = both.pop("labels")
    assert_exact(llama(), [(both, labels)], loss=loss, devices=2, evaluate=False)


def test_a_tokenizers_batch_is_the_dict_it_holds() -> None:
    model = llama()
    plain = copy.deepcopy(model)
    inputs = batch()
    with gapless.Pipeline(model, devices=2, microbatches=3) as pipe:
        ours = pipe.step(hub().BatchEncoding(inputs)).losses
    assert_same(ours, Reference(plain).step(hub().BatchEncoding(inputs), microbatches=3).losses, "losses")
    assert_same_state(model, plain, "a BatchEncoding")


@pytest.mark.parametrize("more", [{}, {"use_cache": True, "return_dict": False}], ids=len)
def test_a_cache_is_not_returned(more: dict[str, Any]) -> None:
    """A graph can't return a DynamicCache: the first thing that most people tried was refused."""
    model = gpt2()
    model.config.use_cache = True  # type: ignore[union-attr]
    with gapless.Pipeline(model, devices=2, microbatches=2, loss=lambda outputs, _: outputs[0]) as pipe:
        result = pipe.step({**batch(4), **more}, torch.zeros(4), outputs=True)
        assert result.loss is not None
        made = [result.outputs] if more else [result.outputs, pipe.evaluate(batch(4)).outputs]
    for outputs in made:
        assert outputs[2] is None if type(outputs) is tuple else outputs.past_key_values is None
    assert model.config.use_cache is True  # type: ignore[union-attr]
    assert not model._forward_hooks


def test_sequences_that_are_packed_attend_as_in_the_plain_loop() -> None:
    """With a cache, which is the default, the model does not tell them apart; without one it would."""
    model = llama()
    model.config.use_cache = True  # type: ignore[union-attr]
    inputs = batch()
    del inputs["attention_mask"]
    inputs["position_ids"] = torch.tensor([0, 1, 2, 0, 1, 2, 3]).repeat(6, 1)
    assert_exact(model, [(inputs, None)], evaluate=False)
    model.config.use_cache = False  # type: ignore[union-attr]
    assert_exact(model, [(inputs, None)], evaluate=False)
